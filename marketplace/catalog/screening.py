"""Which listings are not to be believed, and why.

Pure. Invariant: a listing with a reason is kept, shown to operators only, and never bookable. A listing without a price
has nothing to be disbelieved: missing is not zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

BAND_LOW_PERCENT = 25
BAND_HIGH_PERCENT = 400
# A median of fewer prices says more about who lists than about what the GPU costs.
MIN_PRICES_FOR_MEDIAN = 3
LINEARITY_PERCENT = 40

PRICE_UNREADABLE = "price_unreadable"
PRICE_ZERO = "price_zero"
PRICE_BELOW_BAND = "price_below_25_percent_of_median"
PRICE_ABOVE_BAND = "price_above_400_percent_of_median"
COUNT_NOT_LINEAR = "price_not_linear_in_count"
SPOT_ABOVE_ON_DEMAND = "spot_dearer_than_on_demand"
GPU_UNKNOWN = "gpu_unknown"


@dataclass(frozen=True)
class Listing:
    """What screening looks at. `shape` is all but count and pricing model."""

    uid: str
    gpu: str | None
    shape: Hashable
    gpus: int
    pricing_model: str
    price_uusd_per_gpu_hour: int | None
    price_stated: bool


def medians(prices: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The median price of each GPU that enough offers price; zero prices have no vote."""
    by_gpu: dict[str, list[int]] = defaultdict(list)
    for gpu, price in prices:
        if price > 0:
            by_gpu[gpu].append(price)
    return {gpu: int(median(found)) for gpu, found in by_gpu.items() if len(found) >= MIN_PRICES_FOR_MEDIAN}


def screen(listings: Sequence[Listing], median_uusd_by_gpu: Mapping[str, int]) -> dict[str, str]:
    """The reason of each listing that is quarantined, by its uid. The first reason found is the one given."""
    single: dict[Hashable, int] = {}
    on_demand: dict[Hashable, int] = {}
    for listing in listings:
        price = listing.price_uusd_per_gpu_hour
        if not price:
            continue
        if listing.gpus == 1:
            alone = (listing.shape, listing.pricing_model)
            single[alone] = min(price, single.get(alone, price))
        if listing.pricing_model == "on_demand":
            sized = (listing.shape, listing.gpus)
            on_demand[sized] = min(price, on_demand.get(sized, price))
    reasons: dict[str, str] = {}
    for listing in listings:
        reason = _reason(
            listing,
            median_uusd_by_gpu.get(listing.gpu or ""),
            single.get((listing.shape, listing.pricing_model)),
            on_demand.get((listing.shape, listing.gpus)),
        )
        if reason is not None:
            reasons[listing.uid] = reason
    return reasons


def _reason(listing: Listing, middle: int | None, single: int | None, on_demand: int | None) -> str | None:
    price = listing.price_uusd_per_gpu_hour
    if listing.gpu is None:
        return GPU_UNKNOWN
    if price is None:
        return PRICE_UNREADABLE if listing.price_stated else None
    if price == 0:
        return PRICE_ZERO
    # Before the band: a price per instance read as one per GPU is named for what it is.
    if single is not None and abs(price - single) * 100 > single * LINEARITY_PERCENT:
        return COUNT_NOT_LINEAR
    if middle is not None and price * 100 < middle * BAND_LOW_PERCENT:
        return PRICE_BELOW_BAND
    if middle is not None and price * 100 > middle * BAND_HIGH_PERCENT:
        return PRICE_ABOVE_BAND
    if listing.pricing_model.startswith("spot") and on_demand is not None and price > on_demand:
        return SPOT_ABOVE_ON_DEMAND
    return None
