"""What visitors are shown of the catalogue, and how old it is, in words.

Invariant: an offer with a quarantine reason or withdrawn is in no answer of this module; an offer past its channel's
freshness, or of a list-price channel, is never bookable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db.models import Count, F, Min, Q, QuerySet

from marketplace.catalog.models import ChannelKind, FeedRun, GpuModel, Offer

LISTED = Q(quarantine_reason="", withdrawn_at__isnull=True)
# Every order ends with the uid, so that a page boundary never shows an offer twice or not at all.
SORTS = {
    "price": F("price_uusd_per_gpu_hour").asc(nulls_last=True),
    "-price": F("price_uusd_per_gpu_hour").desc(nulls_last=True),
    "vram": F("vram_gib").asc(nulls_last=True),
    "-vram": F("vram_gib").desc(nulls_last=True),
    "-seen": F("observed_at").desc(),
}


COUNTS_KEPT = 1000


@dataclass(frozen=True)
class OfferFilter:
    """None means: not asked for. `gpu` is a canonical id or a family ("H100")."""

    gpu: str | None = None
    channel: str | None = None
    max_price_uusd_per_gpu_hour: int | None = None
    min_vram_gib: int | None = None
    tier: str | None = None
    spot: bool | None = None
    sort: str = "price"


_counted: dict[tuple[str | None, OfferFilter], int] = {}


def offers(wanted: OfferFilter) -> QuerySet[Offer]:
    """The offers to show. What an offer does not state satisfies no bound on it."""
    found = Offer.objects.filter(LISTED).select_related("gpu", "channel").defer("raw")
    if wanted.gpu is not None:
        # Looked up apart: a condition across the join would keep the index on the offers' GPU from being used.
        named = GpuModel.objects.filter(Q(pk=wanted.gpu) | Q(family__iexact=wanted.gpu))
        found = found.filter(gpu_id__in=list(named.values_list("pk", flat=True)))
    if wanted.channel is not None:
        found = found.filter(channel_id=wanted.channel)
    if wanted.max_price_uusd_per_gpu_hour is not None:
        found = found.filter(price_uusd_per_gpu_hour__lte=wanted.max_price_uusd_per_gpu_hour)
    if wanted.min_vram_gib is not None:
        found = found.filter(vram_gib__gte=wanted.min_vram_gib)
    if wanted.tier is not None:
        found = found.filter(tier=wanted.tier)
    if wanted.spot is not None:
        spot = Q(pricing_model__startswith="spot")
        found = found.filter(spot if wanted.spot else ~spot)
    return found.order_by(SORTS[wanted.sort], "offer_uid")


def count(wanted: OfferFilter) -> int:
    """How many offers `wanted` finds. Counting them is most of a request's cost, and the number changes only with a
    refresh, so it is kept until the next one."""
    latest = FeedRun.objects.order_by("-pk").values_list("pk", flat=True).first()  # ids sort by time
    key = (latest, replace(wanted, sort="price"))
    if key not in _counted:
        if len(_counted) >= COUNTS_KEPT:
            _counted.clear()
        _counted[key] = offers(wanted).order_by().count()
    return _counted[key]


def gpus() -> QuerySet[GpuModel]:
    """Every GPU we have a name for, with how many offers list it and the lowest price among them."""
    listed = Q(offers__quarantine_reason="", offers__withdrawn_at__isnull=True)
    return GpuModel.objects.annotate(
        offer_count=Count("offers", filter=listed),
        from_price_uusd_per_gpu_hour=Min("offers__price_uusd_per_gpu_hour", filter=listed),
    ).order_by("vendor", "family", "id")


def families() -> list[str]:
    """The names people know GPUs by, for the filter's suggestions."""
    return list(GpuModel.objects.order_by("family").values_list("family", flat=True).distinct())


def is_fresh(offer: Offer, now: datetime) -> bool:
    return offer.stale_since is None and now - offer.observed_at <= timedelta(seconds=offer.channel.freshness_s)


def is_bookable(offer: Offer, now: datetime) -> bool:
    """May be asked for a quote. A list price is what a page said: there is nobody to ask."""
    return (
        offer.channel.kind != ChannelKind.LIST
        and not offer.quarantine_reason
        and offer.withdrawn_at is None
        and offer.price_uusd_per_gpu_hour is not None
        and offer.stock_lower_bound != 0
        and is_fresh(offer, now)
    )


def freshness(offer: Offer, now: datetime) -> str:
    """ "list price, seen 24 May 2026, not bookable" or "broker, seen 3 min ago"."""
    kind = offer.channel.get_kind_display()
    if offer.channel.kind == ChannelKind.LIST:
        return f"{kind}, seen {_day(offer.observed_at)}, not bookable"
    words = f"{kind}, seen {_ago(offer.observed_at, now)}"
    if not is_fresh(offer, now):
        return f"{words}, stale, not bookable"
    return words if is_bookable(offer, now) else f"{words}, not bookable"


def _day(moment: datetime) -> str:
    return f"{moment.day} {moment:%b %Y}"


def _ago(moment: datetime, now: datetime) -> str:
    minutes = max(0, (now - moment) // timedelta(minutes=1))
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 24 * 60 else _day(moment)
