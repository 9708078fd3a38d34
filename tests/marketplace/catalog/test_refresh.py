"""What a refresh may do to the catalogue, and what visitors see of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import IntegrityError, transaction

from marketplace.catalog import selectors
from marketplace.catalog.feeds import ChannelFact, FeedError, RawListing
from marketplace.catalog.feeds.prime import PrimeFeed, parse
from marketplace.catalog.models import FeedOutcome, FeedRun, GpuModel, Offer, PriceChange
from marketplace.catalog.services import load_gpus, refresh

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
PRIME = Path(__file__).with_name("fixtures") / "prime_availability.json"
pytestmark = pytest.mark.django_db


@dataclass
class Source:
    """A feed of given listings."""

    listings: Sequence[RawListing]
    name: str = "source"
    channels: Sequence[ChannelFact] = PrimeFeed.channels
    error: str = ""

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        if self.error:
            raise FeedError(self.error)
        return self.listings


@pytest.fixture
def prime() -> list[RawListing]:
    load_gpus()
    return parse(PRIME.read_bytes(), NOW)[0]


def priced(template: RawListing, *prices: str) -> list[RawListing]:
    return [
        replace(template, upstream_sku=f"sku-{n}", price=price, gpus=1, observed_at=NOW)
        for n, price in enumerate(prices)
    ]


def test_loading_twice_changes_nothing() -> None:
    call_command("load_catalogue")
    counts = GpuModel.objects.count(), Offer.objects.count(), PriceChange.objects.count()
    assert counts == (98, 310, 310)
    call_command("load_catalogue")
    assert (GpuModel.objects.count(), Offer.objects.count(), PriceChange.objects.count()) == counts
    latest = FeedRun.objects.latest("ran_at")
    assert (latest.created, latest.repriced, latest.withdrawn) == (0, 0, 0)


def test_an_aggregators_instance_price_becomes_a_price_per_gpu(prime: list[RawListing]) -> None:
    refresh(Source(prime), NOW)
    eight = Offer.objects.get(gpus_per_node=8)
    assert eight.price_uusd_per_gpu_hour == 2_706_800
    assert eight.data_centre_raw == ""
    assert Offer.objects.get(upstream="cloud-one").price_uusd_per_gpu_hour == 1_656_800


def test_a_price_that_does_not_grow_with_the_count_is_quarantined(prime: list[RawListing]) -> None:
    refresh(Source(prime), NOW)
    assert Offer.objects.get(gpus_per_node=4).quarantine_reason == "price_not_linear_in_count"


def test_an_unstated_price_is_kept_as_unstated(prime: list[RawListing]) -> None:
    refresh(Source(prime), NOW)
    offer = Offer.objects.get(pricing_model="quote_only")
    assert offer.price_uusd_per_gpu_hour is None
    assert offer.quarantine_reason == ""
    assert not selectors.is_bookable(offer, NOW)


def test_prices_of_zero_and_far_off_the_median_are_quarantined_with_their_reason(prime: list[RawListing]) -> None:
    refresh(Source(priced(prime[0], "2", "2", "2", "2", "0", "0.49", "8.01", "0.5", "8", "free")), NOW)
    found = {offer.upstream_sku: offer.quarantine_reason for offer in Offer.objects.all()}
    assert found["sku-4"] == "price_zero"
    assert found["sku-5"] == "price_below_25_percent_of_median"
    assert found["sku-6"] == "price_above_400_percent_of_median"
    assert found["sku-7"] == found["sku-8"] == found["sku-0"] == ""
    assert found["sku-9"] == "price_unreadable"
    assert selectors.offers(selectors.OfferFilter()).count() == 6


def test_the_database_refuses_a_free_offer_without_a_reason(prime: list[RawListing]) -> None:
    refresh(Source(priced(prime[0], "2")), NOW)
    with pytest.raises(IntegrityError, match="offer_zero_price_quarantined"), transaction.atomic():
        Offer.objects.update(price_uusd_per_gpu_hour=0)


def test_history_has_a_row_for_each_change_and_none_for_a_poll(prime: list[RawListing]) -> None:
    for minute, price in enumerate(["2", "2", "2.5", "2.5", "2"]):
        moment = NOW + timedelta(minutes=minute)
        refresh(Source([replace(priced(prime[0], price)[0], observed_at=moment)]), moment)
    changes = PriceChange.objects.order_by("observed_at").values_list("price_uusd_per_gpu_hour", flat=True)
    assert list(changes) == [2_000_000, 2_500_000, 2_000_000]


def test_an_answer_of_under_half_keeps_the_old_rows_and_marks_them_stale(prime: list[RawListing]) -> None:
    listings = priced(prime[0], *["2"] * 5)
    refresh(Source(listings), NOW)
    run = refresh(Source(listings[:2]), NOW + timedelta(minutes=1))
    assert run.outcome == FeedOutcome.PARTLY_KEPT
    assert run.kept_channels == ["prime-intellect"]
    assert Offer.objects.filter(withdrawn_at=None, stale_since__isnull=False).count() == 5
    later = refresh(Source(listings[:3]), NOW + timedelta(minutes=2))
    assert (later.outcome, later.withdrawn) == (FeedOutcome.DONE, 2)
    assert Offer.objects.filter(withdrawn_at=None, stale_since=None).count() == 3


def test_a_feed_that_fails_loses_no_offer_and_makes_them_unbookable(prime: list[RawListing]) -> None:
    refresh(Source(priced(prime[0], "2")), NOW)
    run = refresh(Source([], error="no answer"), NOW)
    assert (run.outcome, run.problem) == (FeedOutcome.FAILED, "no answer")
    offer = Offer.objects.select_related("channel").get()
    assert selectors.freshness(offer, NOW) == "broker, seen just now, stale, not bookable"


def test_an_answer_of_another_shape_is_an_error() -> None:
    for body in (b"", b"[]", b'{"items": [{}], "totalCount": 1}'):
        with pytest.raises(FeedError):
            parse(body, NOW)


def test_how_old_an_offer_is_stands_in_words(prime: list[RawListing]) -> None:
    refresh(Source(priced(prime[0], "2")), NOW)
    offer = Offer.objects.select_related("channel").get()
    assert selectors.freshness(offer, NOW + timedelta(minutes=3)) == "broker, seen 3 min ago"
    assert selectors.freshness(offer, NOW + timedelta(minutes=11)) == "broker, seen 11 min ago, stale, not bookable"
    call_command("load_catalogue")
    listed = Offer.objects.select_related("channel").filter(channel="lambda")[0]
    assert selectors.freshness(listed, NOW) == "list price, seen 24 May 2026, not bookable"
    assert not selectors.is_bookable(listed, listed.observed_at)
