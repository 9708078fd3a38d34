"""What only operators see of the catalogue: the listings that are not believed and why, and each feed's last refresh.

Invariant: reads only. What a reason means is said in words here, and a reason without words is shown as it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count, QuerySet

from marketplace.catalog import screening
from marketplace.catalog.models import FeedRun, Offer

WORDS = {
    screening.GPU_UNKNOWN: "No GPU of ours has this name",
    screening.PRICE_UNREADABLE: "The price cannot be read",
    screening.PRICE_ZERO: "Says it costs nothing",
    screening.PRICE_BELOW_BAND: f"Under {screening.BAND_LOW_PERCENT} % of the GPU's median",
    screening.PRICE_ABOVE_BAND: f"Over {screening.BAND_HIGH_PERCENT} % of the GPU's median",
    screening.COUNT_NOT_LINEAR: "Price does not grow with the count",
    screening.SPOT_ABOVE_ON_DEMAND: "Spot dearer than on demand",
}


@dataclass(frozen=True)
class Reason:
    code: str
    words: str
    offers: int


def quarantined(reason: str = "") -> QuerySet[Offer]:
    """What a feed lists and nobody is shown, by channel and name; of one reason, if one is asked for."""
    found = Offer.objects.filter(withdrawn_at=None).exclude(quarantine_reason="").select_related("gpu", "channel")
    if reason:
        found = found.filter(quarantine_reason=reason)
    return found.defer("raw").order_by("channel__name", "gpu_name_raw", "gpus_per_node", "offer_uid")


def reasons() -> list[Reason]:
    """How many there are of each, the most first."""
    rows = quarantined().order_by().values_list("quarantine_reason").annotate(offers=Count("pk"))
    found = [Reason(code, WORDS.get(code, code), offers) for code, offers in rows]
    return sorted(found, key=lambda each: (-each.offers, each.code))


def last_runs() -> list[FeedRun]:
    """The last refresh of every feed that was ever read, by the feed's name."""
    return list(FeedRun.objects.order_by("feed", "-ran_at", "-pk").distinct("feed"))
