"""Quotes: what a preview showed, signed, so that an order placed with it gets that or better, or is not placed.

Invariant: nothing is stored and nothing is kept for whoever asked; a quote promises no GPU, only that nobody pays more
than they were shown. It is for one order of one organisation, for a minute.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core import signing

from marketplace.accounts.access import Actor
from marketplace.core.clock import from_ms, to_ms
from marketplace.core.errors import Conflict, InvalidInput
from marketplace.core.money import format_usd
from marketplace.trading.orders import Wanted

SALT = "archipelago.trading.quote"
STANDS = timedelta(minutes=1)


@dataclass(frozen=True)
class Quoted:
    """`filled` of `asked` GPU-minutes for `cost_uusd`."""

    cost_uusd: int
    filled_gpu_min: int
    asked_gpu_min: int


@dataclass(frozen=True)
class Given:
    id: str
    expires_at: datetime


def sign_quote(actor: Actor, wanted: Wanted, quoted: Quoted, now: datetime) -> Given:
    expires_at = now + STANDS
    body = [
        actor.organisation.pk,
        _print_of(wanted),
        to_ms(expires_at),
        quoted.cost_uusd,
        quoted.filled_gpu_min,
        quoted.asked_gpu_min,
    ]
    return Given(signing.dumps(body, salt=SALT, compress=True), expires_at)


def read_quote(actor: Actor, wanted: Wanted, quote_id: str, now: datetime) -> Quoted:
    try:
        organisation_id, print_of, expires_ms, *figures = signing.loads(quote_id, salt=SALT)
    except (signing.BadSignature, ValueError) as error:
        raise InvalidInput.at("quote_id", "is no quote of ours") from error
    if organisation_id != actor.organisation.pk or print_of != _print_of(wanted):
        raise InvalidInput.at("quote_id", "is for another order")
    if now >= from_ms(expires_ms):
        raise Conflict.at("quote_id", "is over: ask for a new one", code="quote_expired")
    return Quoted(*figures)


def hold_to(quoted: Quoted, got: Quoted) -> None:
    """Refuse what is worse than was shown: fewer of the GPU-minutes asked for, or more money for what there is."""
    less = got.filled_gpu_min * quoted.asked_gpu_min < quoted.filled_gpu_min * got.asked_gpu_min
    dearer = got.cost_uusd * quoted.filled_gpu_min > quoted.cost_uusd * got.filled_gpu_min
    if less or dearer:
        shown, now_uusd = format_usd(quoted.cost_uusd), format_usd(got.cost_uusd)
        raise Conflict.at(
            "quote_id",
            f"the market moved: {shown} were shown, {now_uusd} it would be; nothing was placed",
            code="quote_moved",
        )


def _print_of(wanted: Wanted) -> str:
    return hashlib.sha256(repr(wanted).encode()).hexdigest()[:32]
