"""Money as integer micro-USD, and the few sums that turn GPU time into it.

Invariant: no float and no rounding account. Every amount is the difference of two cumulative floors, so a bill does
not depend on how its interval was sliced, and buyer = seller + fee exactly.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

from marketplace.core.errors import InvalidInput

UUSD_PER_USD = 1_000_000
UUSD_PER_CENT = 10_000
MS_PER_HOUR = 3_600_000
# A price that is a multiple of 60 makes a GPU-minute an integer number of micro-USD.
PRICE_STEP_UUSD_PER_GPU_HOUR = 60
# 2**63 micro-USD is about 9.2e12 USD; we refuse far below it so that sums of many rows stay inside a bigint.
MAX_AMOUNT_UUSD = 10**15


def charge_uusd(rate_uusd_per_gpu_hour: int, gpu_ms_total: int) -> int:
    """Cumulative charge for `gpu_ms_total` GPU-milliseconds. A tick posts charge(t1) - charge(t0)."""
    return rate_uusd_per_gpu_hour * gpu_ms_total // MS_PER_HOUR


def fee_uusd(charge_total_uusd: int, fee_bps: int) -> int:
    """Our cumulative part of a cumulative charge; the seller gets the rest."""
    return charge_total_uusd * fee_bps // 10_000


def window_cost_uusd(rate_uusd_per_gpu_hour: int, gpus: int, minutes: int) -> int:
    """The most a window can cost: exact because the rate is a multiple of 60."""
    if rate_uusd_per_gpu_hour % PRICE_STEP_UUSD_PER_GPU_HOUR:
        raise ValueError("a price must be a multiple of 60 micro-USD per GPU-hour")
    return rate_uusd_per_gpu_hour // 60 * gpus * minutes


def parse_usd(text: str, field: str = "amount_usd") -> int:
    """Dollars as typed by a person ("12", "12.50", "$1,204.18") to micro-USD; exact or refused."""
    cleaned = text.strip().removeprefix("$").replace(",", "").replace("_", "")
    try:
        dollars = Decimal(cleaned)
    except InvalidOperation:
        raise InvalidInput.at(field, f"{text!r} is not an amount of dollars") from None
    if not dollars.is_finite():
        raise InvalidInput.at(field, f"{text!r} is not an amount of dollars")
    scaled = dollars * UUSD_PER_USD
    if scaled != scaled.to_integral_value():
        raise InvalidInput.at(field, "more than six decimal places cannot be paid")
    if abs(scaled) > MAX_AMOUNT_UUSD:
        raise InvalidInput.at(field, "the amount is too large")
    return int(scaled)


def format_usd(amount_uusd: int, places: int = 2) -> str:
    """ "$1,204.18"; half-even at `places`, display only, never stored."""
    value = (Decimal(amount_uusd) / UUSD_PER_USD).quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_EVEN)
    sign = "-" if value < 0 else ""
    return f"{sign}${abs(value):,.{places}f}"


def floor_to_cents_uusd(amount_uusd: int) -> int:
    """Whole cents below the amount: what can leave through a card network; the rest stays on the account."""
    return amount_uusd // UUSD_PER_CENT * UUSD_PER_CENT
