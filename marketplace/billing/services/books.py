"""I10: our books of the payment provider against the provider's own.

Invariant: every difference has a name, or is somebody's to look at; it asks, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Sum

from marketplace.billing import gateway
from marketplace.billing.ledger import account, balance_uusd
from marketplace.billing.models import (
    AccountKind,
    CardRefund,
    CardRefundState,
    Payout,
    PayoutState,
    TopUp,
    TopUpState,
)


@dataclass(frozen=True)
class Books:
    """What we believe is at the provider, what is, and what is known to lie between."""

    ours_uusd: int
    theirs_uusd: int
    fees_to_come_uusd: int  # the provider has taken them, we book them when the payment is available
    on_their_way_uusd: int  # payouts and refunds of which we have not heard: sent or not

    @property
    def unexplained_uusd(self) -> int:
        over = self.ours_uusd - self.fees_to_come_uusd - self.theirs_uusd
        return over if over < 0 else max(0, over - self.on_their_way_uusd)


def compare_books() -> Books:
    funds = gateway.fetch_funds()
    fees = 0
    for top_up in TopUp.objects.filter(state=TopUpState.PAID, available_at=None):
        found = gateway.fetch_settlement(top_up.payment_ref or "")
        fees += 0 if found is None else found.fee_uusd
    out = Payout.objects.filter(state=PayoutState.CREATED).aggregate(total=Sum("amount_uusd"))["total"] or 0
    back = CardRefund.objects.filter(state=CardRefundState.CREATED).aggregate(total=Sum("amount_uusd"))["total"] or 0
    ours = balance_uusd(account(AccountKind.STRIPE_PENDING)) + balance_uusd(account(AccountKind.STRIPE_AVAILABLE))
    return Books(ours, funds.available_uusd + funds.pending_uusd, fees, int(out) + int(back))
