"""Bring what feeds say into the catalogue.

Invariant: a refresh is one transaction after the network is done with; running it twice changes nothing; a channel that
now lists under half of what it listed before keeps its old rows, marked stale, and the run says so.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import connection, transaction

from marketplace.catalog.feeds import Feed, FeedError, RawListing
from marketplace.catalog.feeds.list_prices import DATA, rows_of
from marketplace.catalog.models import (
    Channel,
    FeedOutcome,
    FeedRun,
    GpuAlias,
    GpuModel,
    Offer,
    PriceChange,
)
from marketplace.catalog.normalise import (
    Alias,
    AliasTable,
    decimal_or_none,
    offer_uid,
    price_uusd_per_gpu_hour,
    stock_lower_bound,
)
from marketplace.catalog.screening import Listing, medians, screen

logger = logging.getLogger(__name__)

MEDIAN_WINDOW = timedelta(days=30)
UPDATED_FIELDS = [field.name for field in Offer._meta.concrete_fields if not field.primary_key]
WIDTHS = {field.name: field.max_length for field in Offer._meta.concrete_fields}
# Refreshes wait for each other: two that judge the same previous rows would both be half right.
REFRESH_LOCK = 0x6361_7461


@dataclass
class _Tally:
    created: int = 0
    repriced: int = 0
    withdrawn: int = 0


def load_gpus() -> None:
    """The GPU names that come with the product; safe to repeat, and how a corrected name arrives."""
    gpus = [
        GpuModel(
            id=row["id"],
            vendor=row["vendor"],
            family=row["family"],
            form_factor=row["form_factor"],
            vram_gib=_int_or_none(row["vram_gib"]),
            name=row["name"],
            bf16_dense_tflops=_int_or_none(row["bf16_dense_tflops"]),
            spec_source=row["spec_source"],
        )
        for row in rows_of(DATA / "gpu_models.csv")
    ]
    aliases = [
        GpuAlias(
            raw_name=row["raw_name"],
            raw_vram_gib=decimal_or_none(row["raw_vram_gib"]),
            raw_link=row["raw_link"],
            gpu_id=row["gpu"],
            flags=[flag for flag in row["flags"].split(";") if flag],
            seen_at=row["seen_at"],
        )
        for row in rows_of(DATA / "gpu_aliases.csv")
    ]
    gpu_fields = [field.name for field in GpuModel._meta.concrete_fields if not field.primary_key]
    with transaction.atomic():
        GpuModel.objects.bulk_create(gpus, update_conflicts=True, unique_fields=["id"], update_fields=gpu_fields)
        GpuAlias.objects.bulk_create(
            aliases,
            update_conflicts=True,
            unique_fields=["raw_name", "raw_vram_gib", "raw_link"],
            update_fields=["gpu", "flags", "seen_at"],
        )


def refresh(feed: Feed, now: datetime) -> FeedRun:
    """Read a feed and store what it lists. A feed that fails leaves the rows as they are, and its channels stale."""
    try:
        listings = feed.fetch(now)
    except FeedError as error:
        logger.warning("feed %s failed: %s", feed.name, error)
        slugs = [channel.slug for channel in feed.channels]
        with transaction.atomic():
            Offer.objects.filter(channel__in=slugs, stale_since__isnull=True).update(stale_since=now)
            return FeedRun.objects.create(
                feed=feed.name, ran_at=now, outcome=FeedOutcome.FAILED, kept_channels=slugs, problem=str(error)[:300]
            )
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [REFRESH_LOCK])
        return _store(feed, listings, now)


def _store(feed: Feed, listings: Sequence[RawListing], now: datetime) -> FeedRun:
    Channel.objects.bulk_create(
        [Channel(**vars(fact)) for fact in feed.channels],
        update_conflicts=True,
        unique_fields=["slug"],
        update_fields=["name", "kind", "freshness_s", "source_url"],
    )
    slugs = [fact.slug for fact in feed.channels]
    known = {offer.offer_uid: offer for offer in Offer.objects.filter(channel__in=slugs)}
    offers = _offers_of(listings)

    seen_in: dict[str, int] = defaultdict(int)
    listed_in: dict[str, int] = defaultdict(int)
    for offer in offers.values():
        seen_in[offer.channel_id] += 1
    for offer in known.values():
        listed_in[offer.channel_id] += offer.withdrawn_at is None
    kept = sorted(slug for slug in slugs if seen_in[slug] * 2 < listed_in[slug])
    if kept:
        logger.warning("feed %s: under half of the previous rows of %s; kept the old ones", feed.name, ", ".join(kept))
        Offer.objects.filter(channel__in=kept, stale_since__isnull=True).update(stale_since=now)
        offers = {uid: offer for uid, offer in offers.items() if offer.channel_id not in kept}

    _quarantine(offers)
    tally = _write(offers, known, now, withdrawable=set(slugs) - set(kept))
    return FeedRun.objects.create(
        feed=feed.name,
        ran_at=now,
        outcome=FeedOutcome.PARTLY_KEPT if kept else FeedOutcome.DONE,
        seen=len(listings),
        quarantined=sum(1 for offer in offers.values() if offer.quarantine_reason),
        kept_channels=kept,
        **vars(tally),
    )


def _offers_of(listings: Sequence[RawListing]) -> dict[str, Offer]:
    """Listings as unsaved rows by uid. Of two listings of one identity the cheaper stands: both are on offer."""
    table = AliasTable(
        Alias(alias.raw_name, alias.raw_vram_gib, alias.raw_link, alias.gpu_id, tuple(alias.flags))
        for alias in GpuAlias.objects.all()
    )
    vram_by_gpu = dict(GpuModel.objects.values_list("id", "vram_gib"))
    offers: dict[str, Offer] = {}
    for listing in listings:
        if listing.gpus < 1:
            continue  # a machine without GPUs is nothing this catalogue is about
        offer = _offer_of(listing, table, vram_by_gpu)
        other = offers.get(offer.offer_uid)
        if other is None or _price_order(offer) < _price_order(other):
            offers[offer.offer_uid] = offer
    return offers


def _price_order(offer: Offer) -> tuple[bool, int]:
    price = offer.price_uusd_per_gpu_hour
    return price is None, price or 0


def _offer_of(listing: RawListing, table: AliasTable, vram_by_gpu: dict[str, int | None]) -> Offer:
    match = table.find(listing.gpu_name, listing.vram_gib, listing.link)
    gpu = match.gpu if match else None
    # Where no currency but dollars is understood, another one is no price: better none than a wrong one.
    price = listing.price if listing.currency == "USD" else None
    per = listing.gpus if listing.price_basis in {"per_instance", "per_node"} else 1
    place = listing.data_centre or listing.region
    identity = (listing.upstream_sku, place, listing.gpus, listing.pricing_model, listing.tier)
    return Offer(
        offer_uid=offer_uid(listing.channel, *identity),
        dedupe_group=_group(listing, gpu, place),
        channel_id=listing.channel,
        upstream=_cut("upstream", listing.upstream),
        upstream_sku=_cut("upstream_sku", listing.upstream_sku),
        gpu_id=gpu,
        gpu_name_raw=_cut("gpu_name_raw", listing.gpu_name),
        gpu_flags=list(match.flags) if match else [],
        vram_gib=vram_by_gpu.get(gpu) if gpu else _whole(listing.vram_gib),
        gpus_per_node=listing.gpus,
        intra_link=_cut("intra_link", listing.link),
        vcpus=listing.vcpus,
        ram_mib=listing.ram_mib,
        price_uusd_per_gpu_hour=price_uusd_per_gpu_hour(price, per),
        price_raw=listing.price or "",
        price_basis_raw=listing.price_basis,
        currency_raw=listing.currency,
        pricing_model=listing.pricing_model,
        preemptible=listing.preemptible,
        stock_lower_bound=stock_lower_bound(listing.stock),
        resale_allowed=listing.resale_allowed,
        region_raw=_cut("region_raw", listing.region),
        data_centre_raw=_cut("data_centre_raw", listing.data_centre),
        country=listing.country,
        tier=_cut("tier", listing.tier),
        observed_at=listing.observed_at,
        source_url=listing.source_url,
        raw=listing.raw,
    )


def _group(listing: RawListing, gpu: str | None, place: str) -> str:
    """What is the same cards: slices of one machine, where the source tells; else the same machines through another
    door, which share everything but the door."""
    if listing.machine:
        return offer_uid(listing.upstream, "machine", listing.machine, 0, "", "")
    return offer_uid(
        listing.upstream, gpu or listing.gpu_name, place, listing.gpus, listing.pricing_model, listing.tier
    )


def _quarantine(offers: dict[str, Offer]) -> None:
    """Give each offer that is not to be believed its reason, against what others asked in the last 30 days."""
    if not offers:
        return
    since = min(offer.observed_at for offer in offers.values()) - MEDIAN_WINDOW
    others = Offer.objects.filter(observed_at__gte=since).exclude(offer_uid__in=offers).defer("raw")
    prices = [
        (offer.gpu_id, offer.price_uusd_per_gpu_hour)
        for offer in (*others, *offers.values())
        if offer.gpu_id and offer.price_uusd_per_gpu_hour
    ]
    listings = [
        Listing(
            uid=uid,
            gpu=offer.gpu_id,
            shape=(offer.channel_id, offer.upstream_sku, offer.region_raw, offer.data_centre_raw, offer.tier),
            gpus=offer.gpus_per_node,
            pricing_model=offer.pricing_model,
            price_uusd_per_gpu_hour=offer.price_uusd_per_gpu_hour,
            price_stated=bool(offer.price_raw),
        )
        for uid, offer in offers.items()
    ]
    for uid, reason in screen(listings, medians(prices)).items():
        offers[uid].quarantine_reason = reason


def _write(offers: dict[str, Offer], known: dict[str, Offer], now: datetime, withdrawable: set[str]) -> _Tally:
    tally = _Tally()
    changes: list[PriceChange] = []
    for uid, offer in offers.items():
        before = known.get(uid)
        if before is not None and before.price_uusd_per_gpu_hour == offer.price_uusd_per_gpu_hour:
            continue
        tally.created += before is None
        tally.repriced += before is not None
        changes.append(
            PriceChange(
                offer_id=uid, price_uusd_per_gpu_hour=offer.price_uusd_per_gpu_hour, observed_at=offer.observed_at
            )
        )
    Offer.objects.bulk_create(
        offers.values(), update_conflicts=True, unique_fields=["offer_uid"], update_fields=UPDATED_FIELDS
    )
    # A correction of the same observation replaces it: still one row per change.
    PriceChange.objects.bulk_create(
        changes,
        update_conflicts=True,
        unique_fields=["offer", "observed_at"],
        update_fields=["price_uusd_per_gpu_hour"],
    )
    gone = [
        uid
        for uid, offer in known.items()
        if uid not in offers and offer.withdrawn_at is None and offer.channel_id in withdrawable
    ]
    tally.withdrawn = Offer.objects.filter(offer_uid__in=gone).update(withdrawn_at=now)
    return tally


def _int_or_none(text: str) -> int | None:
    return int(text) if text else None


def _cut(field: str, text: str) -> str:
    """What fits the column: one source's long word must not cost a whole refresh. All of it is in `raw`."""
    return text[: WIDTHS[field]]


def _whole(value: Decimal | None) -> int | None:
    return int(value) if value is not None and value >= 1 else None


def as_counts(run: FeedRun) -> dict[str, Any]:
    """What a person running a refresh by hand is told."""
    return {name: getattr(run, name) for name in ("outcome", "seen", "created", "repriced", "withdrawn", "quarantined")}
