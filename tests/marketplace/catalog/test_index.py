"""What others asked for a GPU, day by day."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from itertools import count

import pytest
from django.core.management import call_command
from django.test import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from marketplace.catalog.index import DAYS_MAX, SPOT, listed_index
from marketplace.catalog.models import Channel, GpuModel, Offer, PriceChange
from marketplace.catalog.strip import quantile
from marketplace.core.errors import NotFound

GPU = "h100-sxm-80g"
NOW = datetime(2026, 6, 10, 15, tzinfo=UTC)
DAYS = 6
FRESH = timedelta(hours=30)
_numbers = count()


def at(hours_before: float) -> datetime:
    return NOW - timedelta(hours=hours_before)


def offer(
    *changes: tuple[datetime, int | None],
    group: str = "",
    withdrawn_at: datetime | None = None,
    seen: datetime | None = None,
    **more: object,
) -> Offer:
    """An offer with its prices over time; seen last at its last price, if nothing else is said."""
    channel, _ = Channel.objects.get_or_create(
        slug="acme", defaults={"name": "Acme", "kind": "broker", "freshness_s": int(FRESH.total_seconds())}
    )
    gpu, _ = GpuModel.objects.get_or_create(pk=GPU, defaults={"form_factor": "sxm", "name": "H100 SXM 80 GB"})
    uid = f"offer-{next(_numbers)}"
    made = Offer.objects.create(
        **{
            "offer_uid": uid,
            "dedupe_group": group or uid,
            "channel": channel,
            "upstream": "acme",
            "upstream_sku": uid,
            "gpu": gpu,
            "gpu_name_raw": "H100",
            "gpus_per_node": 8,
            "price_uusd_per_gpu_hour": changes[-1][1],
            "price_basis_raw": "per_gpu",
            "currency_raw": "USD",
            "pricing_model": "on_demand",
            "observed_at": seen or changes[-1][0],
            "withdrawn_at": withdrawn_at,
            "raw": {},
            **more,
        }
    )
    PriceChange.objects.bulk_create(
        PriceChange(offer=made, observed_at=moment, price_uusd_per_gpu_hour=price) for moment, price in changes
    )
    return made


def medians(days: int = DAYS) -> dict[date, int]:
    return {each.day: each.median_uusd_per_gpu_hour for each in listed_index(GPU, days, NOW)}


@pytest.mark.django_db
def test_a_price_counts_from_its_day_until_the_next_and_the_day_in_progress_counts() -> None:
    offer((at(72), 300), (at(24), 200), seen=NOW)
    assert medians() == {
        NOW.date() - timedelta(days=ago): price for ago, price in ((3, 300), (2, 300), (1, 200), (0, 200))
    }


@pytest.mark.django_db
def test_what_was_withdrawn_or_has_gone_stale_counts_no_longer_and_an_empty_day_is_missing() -> None:
    offer((at(120), 300), withdrawn_at=at(72), seen=at(96))
    offer((at(48), 100))  # seen once, fresh for thirty hours
    days = medians()
    assert NOW.date() not in days
    assert [days.get(NOW.date() - timedelta(days=ago)) for ago in (5, 4, 3, 2, 1)] == [300, 300, 300, 100, 100]


@pytest.mark.django_db
def test_the_same_cards_have_one_vote_their_lowest() -> None:
    offer((at(1), 300), group="one")
    offer((at(1), 100), group="one")
    offer((at(1), 500))
    (day,) = listed_index(GPU, 1, NOW)
    assert (day.offers, day.p10_uusd_per_gpu_hour, day.p90_uusd_per_gpu_hour) == (2, 100, 500)


@pytest.mark.django_db
def test_what_is_quarantined_on_request_or_spot_has_no_vote_on_demand() -> None:
    offer((at(1), 1), quarantine_reason="price_below_25_percent_of_median")
    offer((at(30), 300), (at(1), None))
    offer((at(1), 90), pricing_model="spot_fixed")
    assert listed_index(GPU, 1, NOW) == []
    assert [each.median_uusd_per_gpu_hour for each in listed_index(GPU, 1, NOW, SPOT)] == [90]


HOURS = st.integers(0, DAYS * 24 - 1)
HISTORY = st.tuples(
    st.dictionaries(HOURS, st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from("abcd"),
    st.one_of(st.none(), HOURS),
)


class AgainstAReading(TestCase):
    """The same, read offer by offer and day by day."""

    @settings(max_examples=40)
    @given(histories=st.lists(HISTORY, max_size=6))
    def test_every_day_is_what_a_person_would_read_from_the_history(
        self, histories: list[tuple[dict[int, int | None], str, int | None]]
    ) -> None:
        votes: dict[date, dict[str, int]] = defaultdict(dict)
        for prices, group, gone in histories:
            changes = sorted((at(hours), price) for hours, price in prices.items())
            withdrawn_at = None if gone is None else at(gone)
            offer(*changes, group=group, withdrawn_at=withdrawn_at)
            until = withdrawn_at or changes[-1][0] + FRESH
            for ago in range(DAYS):
                day = NOW.date() - timedelta(days=ago)
                begins = datetime(day.year, day.month, day.day, tzinfo=UTC)
                known = [price for moment, price in changes if moment < begins + timedelta(days=1)]
                if until >= begins and known and known[-1] is not None:
                    votes[day][group] = min(known[-1], votes[day].get(group, known[-1]))
        expected = [
            (day, len(asked), *(quantile(sorted(asked.values()), share) for share in (0.1, 0.5, 0.9)))
            for day, asked in sorted(votes.items())
        ]
        found = [
            (d.day, d.offers, d.p10_uusd_per_gpu_hour, d.median_uusd_per_gpu_hour, d.p90_uusd_per_gpu_hour)
            for d in (listed_index(GPU, DAYS, NOW) if histories else [])
        ]
        assert found == expected


@pytest.mark.django_db
def test_it_is_read_without_an_account_and_refuses_what_it_does_not_know(client: Client) -> None:
    call_command("load_catalogue")
    # List prices of another month are not today's.
    assert client.get("/api/v1/indices/listed", {"gpu": GPU, "days": 1}).json() == []
    assert client.get("/api/v1/indices/listed", {"gpu": "nothing"}).status_code == 404
    assert (
        client.get("/api/v1/indices/listed", {"gpu": GPU, "days": DAYS_MAX + 1}).json()["fields"][0]["field"] == "days"
    )
    assert client.get("/api/v1/indices/listed").json()["fields"][0]["field"] == "gpu"
    with pytest.raises(NotFound):
        listed_index("nothing", 1, NOW)
