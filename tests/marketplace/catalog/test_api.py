"""The catalogue over REST, as a program reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from marketplace.catalog.api import OfferSerializer
from marketplace.catalog.models import FeedRun, Offer

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def catalogue(db: None) -> None:
    call_command("load_catalogue")


def offers(client: Client, **query: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/offers", query)
    assert answer.status_code == 200, answer.content
    body: dict[str, Any] = answer.json()
    return body


def test_pages_together_hold_every_offer_once(client: Client) -> None:
    pages = [offers(client, limit=100, offset=start) for start in range(0, 400, 100)]
    seen = [offer["offer_uid"] for page in pages for offer in page["results"]]

    listed = Offer.objects.filter(quarantine_reason="").values_list("pk", flat=True)
    assert sorted(seen) == sorted(listed)
    assert {page["count"] for page in pages} == {len(seen)}
    assert pages[-1]["next"] is None


def test_each_filter_narrows(client: Client) -> None:
    everything = offers(client, limit=100)
    checks: dict[str, tuple[Any, Callable[[dict[str, Any]], bool]]] = {
        "gpu": ("h100-sxm-80g", lambda row: row["gpu"] == "h100-sxm-80g"),
        "channel": ("lambda", lambda row: row["channel"] == "lambda"),
        "max_price_uusd_per_gpu_hour": (1_000_000, lambda row: row["price_uusd_per_gpu_hour"] <= 1_000_000),
        "min_vram_gib": (80, lambda row: row["vram_gib"] >= 80),
        "tier": ("community", lambda row: row["tier"] == "community"),
        "spot": ("true", lambda row: row["spot"]),
    }
    for name, (value, holds) in checks.items():
        answer = offers(client, **{name: value, "limit": 100})
        assert 0 < answer["count"] < everything["count"], name
        assert all(holds(row) for row in answer["results"]), name


def test_a_list_costs_few_queries_whatever_it_finds(client: Client, django_assert_max_num_queries: Any) -> None:
    offers(client, gpu="H100")
    with django_assert_max_num_queries(4):
        assert len(offers(client, gpu="H100", limit=20)["results"]) == 20


def test_offers_come_cheapest_first_and_those_without_a_price_last(client: Client) -> None:
    prices = [offer["price_uusd_per_gpu_hour"] for offer in offers(client, limit=100)["results"]]
    stated = [price for price in prices if price is not None]
    assert stated == sorted(stated)
    assert prices[: len(stated)] == stated


def test_a_family_and_a_canonical_id_both_name_a_gpu(client: Client) -> None:
    family = offers(client, gpu="h100", limit=100)
    one = offers(client, gpu="h100-sxm-80g", limit=100)
    assert 0 < one["count"] < family["count"]
    assert {offer["gpu"] for offer in one["results"]} == {"h100-sxm-80g"}
    assert offers(client, gpu="no-such-gpu") == {"count": 0, "next": None, "previous": None, "results": []}


def test_a_refresh_that_withdraws_an_offer_is_seen_in_the_count(client: Client) -> None:
    before = offers(client)["count"]
    Offer.objects.filter(pk=offers(client)["results"][0]["offer_uid"]).delete()
    FeedRun.objects.create(feed="test", ran_at=Offer.objects.latest("observed_at").observed_at, outcome="done")
    assert offers(client)["count"] == before - 1


def test_every_field_of_the_schema_is_in_the_answer_and_no_other(client: Client) -> None:
    assert list(offers(client)["results"][0]) == list(OfferSerializer().fields)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"max_price_uusd_per_gpu_hour": "cheap"}, "max_price_uusd_per_gpu_hour"),
        ({"gpus": "H100"}, "gpus"),
        ({"sort": "luck"}, "sort"),
    ],
)
def test_a_filter_that_is_malformed_or_unknown_is_refused_by_name(
    client: Client, query: dict[str, str], field: str
) -> None:
    answer = client.get("/api/v1/offers", query)
    assert answer.status_code == 422
    assert [problem["field"] for problem in answer.json()["fields"]] == [field]


def test_no_list_price_claims_to_be_bookable(client: Client) -> None:
    found = offers(client, limit=100)["results"]
    assert not any(offer["bookable"] for offer in found)
    assert all("not bookable" in offer["freshness"] for offer in found)


def test_gpus_say_how_many_offers_list_them_and_from_what_price(
    client: Client, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(3):
        answer = client.get("/api/v1/gpus", {"limit": 100}).json()
    assert answer["count"] == 98
    h100 = next(row for row in answer["results"] if row["id"] == "h100-sxm-80g")
    assert h100["offer_count"] > 5
    cheapest = client.get("/api/v1/offers", {"gpu": "h100-sxm-80g", "limit": 1}).json()["results"][0]
    assert h100["from_price_uusd_per_gpu_hour"] == cheapest["price_uusd_per_gpu_hour"]
    assert h100["bf16_dense_tflops"] == 989
