"""The market of a class: depth, supply, trades and prices; over REST and on its page."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import DjangoAssertNumQueries

from marketplace.core.clock import database_now
from marketplace.trading.depth import Level, Offered, asked, bid, by_day, supply
from marketplace.trading.market_chart import depth_picture, price_picture, supply_bands
from marketplace.trading.services import rent
from tests.marketplace.catalog.test_index import offer as listed_offer
from tests.marketplace.trading.market import PRICE, make_island
from tests.marketplace.trading.test_order_api import asked as order_asked
from tests.marketplace.trading.test_order_api import offered as sale_of
from tests.marketplace.training.people import Caller, customer

GPU = "h100-sxm-80g"


def at_place(place: str, price: int, start: int, end: int, gpus: int = 1) -> Offered:
    return Offered(place, gpus, price, start, end)


def test_a_gpu_counts_for_a_window_only_where_it_is_offered_in_every_minute_and_at_its_cheapest() -> None:
    offers = [
        at_place("a", 200, 0, 100),
        at_place("a", 100, 0, 100),
        at_place("b", 150, 0, 60),
        at_place("c", 300, 0, 120),
    ]
    assert asked(offers, 0, 100) == [Level(100, 1, 1), Level(300, 1, 2)]
    assert asked(offers, 0, 60) == [Level(100, 1, 1), Level(150, 1, 2), Level(300, 1, 3)]
    assert asked(offers, 0, 121) == []


def test_bids_add_up_from_the_dearest_down() -> None:
    assert bid([(100, 2), (300, 1), (100, 1)]) == [Level(300, 1, 1), Level(100, 3, 4)]


def test_supply_counts_whole_hours_at_or_below_each_price() -> None:
    seen = supply([at_place("a", 100, 0, 120, 2), at_place("b", 200, 30, 180, 3)], 0, 3)
    assert seen.prices == (100, 200)
    assert seen.hours == ((2, 2), (2, 5), (0, 3))
    assert seen.most == 5


@given(
    offers=st.lists(
        st.builds(
            lambda place, price, start, length: at_place(place, price, start, start + length),
            st.sampled_from("abc"),
            st.integers(1, 9),
            st.integers(0, 300),
            st.integers(1, 300),
        ),
        max_size=8,
    )
)
def test_no_hour_offers_more_than_there_is_and_dearer_levels_include_the_cheaper(offers: list[Offered]) -> None:
    seen = supply(offers, 0, 8)
    for hour, row in enumerate(seen.hours):
        assert list(row) == sorted(row)
        for price, gpus in zip(seen.prices, row, strict=True):
            inside = {
                offer.place
                for offer in offers
                if offer.start_min <= hour * 60
                and offer.end_min >= hour * 60 + 60
                and offer.price_uusd_per_gpu_hour <= price
            }
            assert gpus == len(inside)
    assert len(supply_bands(seen)) in (0, len(seen.prices))


def test_a_days_price_is_weighted_by_what_was_traded() -> None:
    (day,) = by_day([("2026-12-01", 100, 1), ("2026-12-01", 200, 3)])
    assert (day.average_uusd_per_gpu_hour, day.low_uusd_per_gpu_hour, day.high_uusd_per_gpu_hour) == (175, 100, 200)


def test_pictures_of_nothing_are_no_pictures() -> None:
    assert depth_picture([], []) is None
    assert price_picture([(90, 100, 110)]) is None
    assert supply_bands(supply([], 0, 24)) == []


def test_a_picture_of_prices_spans_from_the_lowest_to_the_highest() -> None:
    seen = price_picture([(90, 100, 110), (100, 120, 200)])
    assert seen is not None
    assert (seen.low_uusd, seen.high_uusd) == (90, 200)
    assert seen.line == "M0 176L1000 142"


@pytest.fixture
def seller(db: None) -> Caller:
    return Caller(customer(dollars=1_000))


def rented(seller: Caller) -> str:
    island = make_island(name="fjord")
    end = database_now() + timedelta(hours=30)
    lease = rent(seller.actor.organisation, island_id=island.pk, gpus=3, end_at=end, by="t", now=database_now())
    return str(lease.pk)


@pytest.mark.django_db
def test_the_book_of_a_class_is_read_without_an_account_and_names_nobody(seller: Caller) -> None:
    lease_id = rented(seller)
    seller.post("orders", sale_of(lease_id, gpus=2))
    seller.post("orders", order_asked(gpus=1, limit_uusd_per_gpu_hour=600_000))
    anyone = Client()

    (row,) = [each for each in anyone.get("/api/v1/market").json() if each["gpu"] == GPU]
    assert row["bid_uusd_per_gpu_hour"] == 600_000
    assert (row["free_gpus"], row["ask_uusd_per_gpu_hour"], row["last_uusd_per_gpu_hour"]) == (7, PRICE // 2, PRICE)
    depth = anyone.get(f"/api/v1/market/{GPU}/depth", {"start_at": later(1), "end_at": later(3)}).json()
    assert [(each["price_uusd_per_gpu_hour"], each["gpus"], each["total_gpus"]) for each in depth["asks"]] == [
        (PRICE // 2, 2, 2),
        (PRICE, 5, 7),
    ]
    seen = anyone.get(f"/api/v1/market/{GPU}/supply", {"hours": 48}).json()
    assert seen["prices_uusd_per_gpu_hour"] == [PRICE // 2, PRICE]
    assert seen["gpus"][5] == [2, 7]
    assert seen["gpus"][40] == [0, 8]
    (fill,) = anyone.get("/api/v1/fills", {"gpu": GPU}).json()["results"]
    assert (fill["gpus"], fill["price_uusd_per_gpu_hour"], fill["kind"]) == (3, PRICE, "rent")
    assert "organisation" not in str(fill)
    (day,) = anyone.get("/api/v1/indices", {"gpu": GPU}).json()
    assert day["average_uusd_per_gpu_hour"] == PRICE


@pytest.mark.django_db
def test_a_position_is_what_is_still_held_and_the_callers_own(seller: Caller) -> None:
    lease_id = rented(seller)
    seller.post("orders", sale_of(lease_id, gpus=2))
    other = Caller(customer(dollars=1_000))
    start = later(2)
    body = order_asked(4, gpus=2, start_at=start, limit_uusd_per_gpu_hour=PRICE // 2)
    assert other.post("orders", body).json()["state"] == "filled"
    assert [piece["gpus"] for piece in seller.get("positions").json()[0]["pieces"]] == [3, 1, 3]
    assert [piece["gpus"] for piece in other.get("positions").json()[0]["pieces"]] == [2]
    assert Client().get("/api/v1/positions").status_code == 401


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("market/nothing/depth", {}, 404),
        (f"market/{GPU}/depth", {"start_at": "2020-01-01T00:00:00Z"}, 422),
        (f"market/{GPU}/supply", {"hours": "0"}, 422),
        ("fills", {"since": "2026-01-02T00:00:00Z", "until": "2026-01-01T00:00:00Z"}, 422),
        ("indices", {}, 422),
    ],
)
def test_what_cannot_be_asked_is_named(path: str, query: dict[str, Any], status: int) -> None:
    make_island()
    assert Client().get(f"/api/v1/{path}", query).status_code == status


@pytest.mark.django_db
def test_the_page_of_a_class_shows_pictures_and_the_same_as_tables(
    seller: Caller, client: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    lease_id = rented(seller)
    seller.post("orders", sale_of(lease_id, gpus=2))
    for number in range(4):
        make_island(name=f"reef {number}", price_uusd_per_gpu_hour=PRICE + 60 * number)
    with django_assert_max_num_queries(18):
        shown = client.get(f"/market/{GPU}").content.decode()
    for words in ("The coming week", "As a table", "Asked, for all of it", "Day by day", "Rent", "up to"):
        assert words in shown
    assert client.get("/market/nothing").status_code == 404
    assert f"/market/{GPU}" in client.get("/market").content.decode()


@pytest.mark.django_db
def test_the_page_of_a_class_nobody_offers_says_so(client: Client) -> None:
    make_island(listed=False)
    shown = client.get(f"/market/{GPU}").content.decode()
    assert "Nobody offers this GPU here" in shown
    assert "Nothing was traded" in shown


def later(hours: float) -> str:
    return (database_now() + timedelta(hours=hours)).isoformat()


@pytest.mark.django_db
def test_the_page_draws_what_others_asked_over_the_days() -> None:
    make_island(name="fjord")
    now = database_now()
    listing = listed_offer((now - timedelta(days=3), 2_000_000), (now - timedelta(days=1), 1_500_000), seen=now)
    page = Client().get(f"/market/{GPU}").content.decode()
    assert "that others asked on demand" in page
    assert page.count('class="average"') == 1
    listing.delete()
    assert "that others asked on demand" not in Client().get(f"/market/{GPU}").content.decode()
