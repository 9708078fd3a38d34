"""What renting would cost and why it might be refused, before anybody commits to anything.

Invariant: writes nothing and locks nothing; its answer is what `rent` would say at the same moment, with every reason
at its field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from django.conf import settings

from marketplace.accounts.models import Organisation
from marketplace.core.errors import FieldProblem, InsufficientFunds, Problem
from marketplace.core.money import format_usd
from marketplace.fleet.models import Island
from marketplace.trading.selectors import free_gpus, spendable_uusd
from marketplace.trading.services.locking import find_island
from marketplace.trading.services.renting import Wish
from marketplace.trading.windows import (
    NOT_AVAILABLE,
    Window,
    check_offered,
    check_price,
    check_size,
    free_in_words,
    snapped,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Reason:
    """Why it would be refused; `field` is "" where it lies with none of what was asked."""

    code: str
    field: str
    message: str


@dataclass(frozen=True)
class Quote:
    """None where it cannot be said: a window that is no window has no cost."""

    island: Island
    gpus: int
    window: Window | None
    cost_uusd: int | None
    free_gpus: int | None
    spendable_uusd: int
    fee_bps: int
    reasons: tuple[Reason, ...]

    @property
    def fee_note(self) -> str:
        part = f"{self.fee_bps / 100:g} %"
        return f"The price is all you pay: our {part} come out of what the seller earns."


def quote(organisation: Organisation, wish: Wish, now: datetime) -> Quote:
    island = find_island(wish.island_id, locked=False)
    reasons: list[Reason] = []
    spendable = spendable_uusd(organisation)
    window = _try(reasons, lambda: snapped(wish.start_at, wish.end_at, now))
    cost_uusd, free = None, None
    if window is not None:
        held = window
        cost_uusd = _try(reasons, lambda: check_size(island, wish.gpus, held))
        _try(reasons, lambda: check_offered(island, held, now))
        free = free_gpus(island, window.start_min, window.end_min)
        if cost_uusd is not None and free < wish.gpus:
            reasons.append(Reason(NOT_AVAILABLE, "gpus", free_in_words(free)))
    _try(reasons, lambda: check_price(island, wish.max_price_uusd_per_gpu_hour, "max_price_uusd_per_gpu_hour"))
    if cost_uusd is not None and cost_uusd > spendable:
        short = format_usd(cost_uusd - spendable)
        reasons.append(Reason(InsufficientFunds.default_code, "", f"{short} more is needed on your account"))
    return Quote(island, wish.gpus, window, cost_uusd, free, spendable, settings.MARKET_FEE_BPS, tuple(reasons))


def _try(reasons: list[Reason], check: Callable[[], T]) -> T | None:
    """The check's answer; what it raises is one of the reasons."""
    try:
        return check()
    except Problem as problem:
        fields = problem.fields or [FieldProblem("", problem.message)]
        reasons += [Reason(problem.code, each.field, each.message) for each in fields]
        return None
