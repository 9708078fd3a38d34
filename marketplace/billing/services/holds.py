"""Money in, held, and given back: cash -> job escrow -> lease escrow -> back.

Invariant: what is held comes from somewhere and what is left goes back; a repeated call moves nothing twice.
"""

from __future__ import annotations

from django.db import transaction

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, account, accounts, lock, post
from marketplace.billing.models import AccountKind, LedgerAccount, TransferKind
from marketplace.billing.services.freezing import is_frozen
from marketplace.core.errors import Conflict
from marketplace.core.ids import fact_id


def cash(organisation: Organisation) -> LedgerAccount:
    return account(AccountKind.BUYER_CASH, organisation)


def escrow(ref: str, organisation: Organisation) -> LedgerAccount:
    return account(AccountKind.ESCROW, organisation, ref)


def deposit(organisation: Organisation, amount_uusd: int, payment_ref: str) -> None:
    """Credit a payment that the payment provider confirmed; the payment's name makes it count once."""
    source, target = accounts((AccountKind.STRIPE_PENDING, None, ""), (AccountKind.BUYER_CASH, organisation.pk, ""))
    key = fact_id("deposit", payment_ref)
    post([Entry(key, TransferKind.DEPOSIT, source, target, amount_uusd, payment_ref)])


def hold(ref: str, organisation: Organisation, amount_uusd: int, tranche: int = 0) -> LedgerAccount:
    """Hold cash in the escrow `ref`; another tranche adds to it. Who is frozen holds no more."""
    if is_frozen(organisation):
        raise Conflict("payments of this organisation are under dispute: nothing more is held", code="frozen")
    source, target = accounts((AccountKind.BUYER_CASH, organisation.pk, ""), (AccountKind.ESCROW, organisation.pk, ref))
    key = fact_id("hold", ref, tranche)
    post([Entry(key, TransferKind.HOLD, source, target, amount_uusd, ref)])
    return target


def hold_from(
    ref: str, source_ref: str, organisation: Organisation, amount_uusd: int, tranche: int = 0
) -> LedgerAccount:
    """Hold part of what the escrow `source_ref` already holds."""
    source, target = accounts(*((AccountKind.ESCROW, organisation.pk, each) for each in (source_ref, ref)))
    key = fact_id("earmark", ref, source_ref, tranche)
    post([Entry(key, TransferKind.EARMARK, source, target, amount_uusd, ref)])
    return target


@transaction.atomic
def release(source: LedgerAccount, target: LedgerAccount) -> int:
    """Give back all that is left; returns how much. An empty escrow releases nothing."""
    source, target = lock(source, target)
    amount_uusd = source.available_uusd
    if amount_uusd > 0:
        # All that ever left the account names this release: the number only grows, so no two releases share an id.
        key = fact_id("release", source.pk, source.debits_posted_uusd)
        post([Entry(key, TransferKind.RELEASE, source, target, amount_uusd, source.ref)])
    return amount_uusd
