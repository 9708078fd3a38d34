"""Renting over REST, as programs of two organisations do it. Times are of the real clock: the edge reads it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.accounts.services import issue_key
from marketplace.billing.models import Transfer
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Lease
from marketplace.trading.services import rent
from tests.marketplace.trading.market import GPU_MINUTE, PRICE, USD, cash_uusd, funded, leased, make_island

pytestmark = pytest.mark.django_db

Call = Callable[..., Any]
_keys = count(1)


def caller(organisation: Organisation, role: str = Role.MEMBER) -> Call:
    """A program of the organisation: `call(method, path, body, key=...)`."""
    issued = issue_key(
        Actor(organisation, Role.OWNER, "test"), name="t", role=role, expires_in_days=1, now=database_now()
    )
    client = Client(headers={"Authorization": f"Bearer {issued.secret}"})

    def call(method: str, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
        headers = {"Idempotency-Key": key or f"key-{next(_keys)}"} if method == "post" else {}
        return getattr(client, method)(f"/api/v1/{path}", body, content_type="application/json", headers=headers)

    return call


@pytest.fixture
def call(buyer: Organisation) -> Call:
    return caller(buyer)


def wish(island: Island, minutes: int = 60, **more: Any) -> dict[str, Any]:
    end_at = minute_start(minute_of(database_now()) + minutes)
    return {"island_id": island.pk, "gpus": 2, "end_at": end_at.isoformat(), **more}


def test_a_lease_is_made_read_extended_and_ended(call: Call, buyer: Organisation, island: Island) -> None:
    made = call("post", "leases", wish(island, max_price_uusd_per_gpu_hour=PRICE))
    assert made.status_code == 201, made.content
    lease = made.json()
    assert (lease["state"], lease["gpus"], lease["held_uusd"]) == ("active", 2, 120 * GPU_MINUTE)
    assert lease["island"] == {"id": island.pk, "name": island.name, "region": "north"}
    assert call("get", f"leases/{lease['id']}").json() == lease
    assert call("get", "leases").json()["results"] == [lease]

    longer = minute_start(minute_of(database_now()) + 90).isoformat()
    extended = call("post", f"leases/{lease['id']}/extend", {"end_at": longer})
    assert (extended.status_code, extended.json()["held_uusd"]) == (200, 180 * GPU_MINUTE)

    ended = call("post", f"leases/{lease['id']}/end")
    assert (ended.status_code, ended.json()["state"], ended.json()["end_reason"]) == (200, "ended", "released")


def test_the_same_key_is_the_same_lease(call: Call, buyer: Organisation, island: Island) -> None:
    body = wish(island)
    first, second = (call("post", "leases", body, key="k1") for _ in range(2))
    assert first.json() == second.json()
    assert second.headers["Idempotency-Replayed"] == "true"
    assert Lease.objects.count() == 1
    assert cash_uusd(buyer) == 1_000 * USD - 120 * GPU_MINUTE


def test_a_write_without_a_key_is_refused(buyer: Organisation, island: Island) -> None:
    issued = issue_key(
        Actor(buyer, Role.OWNER, "test"), name="t", role=Role.MEMBER, expires_in_days=1, now=database_now()
    )
    client = Client(headers={"Authorization": f"Bearer {issued.secret}"})
    answer = client.post("/api/v1/leases", wish(island), content_type="application/json")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_missing")


@pytest.mark.parametrize(
    ("more", "status", "code", "field"),
    [
        ({"gpus": 9}, 422, "invalid", "gpus"),
        ({"gpus": "many"}, 422, "invalid", "gpus"),
        ({"end_at": "2001-01-01T00:00:00Z"}, 422, "invalid", "end_at"),
        ({"island_id": "isl_none"}, 404, "not_found", "island_id"),
        ({"max_price_uusd_per_gpu_hour": 60}, 409, "price_changed", "max_price_uusd_per_gpu_hour"),
    ],
)
def test_a_refusal_names_the_field(
    call: Call, island: Island, more: dict[str, Any], status: int, code: str, field: str
) -> None:
    answer = call("post", "leases", wish(island, **more))
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert [each["field"] for each in answer.json()["fields"]] == [field]


def test_without_money_it_is_402(island: Island) -> None:
    answer = caller(funded("poor", dollars=0))("post", "leases", wish(island))
    assert (answer.status_code, answer.json()["code"]) == (402, "insufficient_funds")


def test_a_preview_writes_nothing_and_gives_every_reason(island: Island) -> None:
    poor = caller(funded("poor", dollars=1))
    before = Transfer.objects.count()
    Island.objects.filter(pk=island.pk).update(state=IslandState.LOST)
    told = poor("post", "leases/preview", wish(island, max_price_uusd_per_gpu_hour=60)).json()
    assert told["cost_uusd"] == 120 * GPU_MINUTE
    assert [(each["code"], each["field"]) for each in told["reasons"]] == [
        ("not_available", "island_id"),
        ("price_changed", "max_price_uusd_per_gpu_hour"),
        ("insufficient_funds", ""),
    ]
    assert not told["can_be_rented"]
    assert not Lease.objects.exists()
    assert Transfer.objects.count() == before


def test_what_a_preview_promises_is_what_renting_holds(call: Call, buyer: Organisation, island: Island) -> None:
    body = wish(island)
    told = call("post", "leases/preview", body).json()
    assert told["can_be_rented"]
    assert (told["free_gpus"], told["spendable_uusd"]) == (8, 1_000 * USD)
    assert call("post", "leases", body).json()["held_uusd"] == told["cost_uusd"]
    assert call("post", "leases/preview", body).json()["free_gpus"] == 6


def test_another_organisations_lease_is_404_everywhere(call: Call, island: Island) -> None:
    lease = call("post", "leases", wish(island)).json()["id"]
    stranger = caller(funded("stranger"))
    end_at = minute_start(minute_of(database_now()) + 90).isoformat()
    answers = [
        stranger("get", f"leases/{lease}"),
        stranger("post", f"leases/{lease}/extend", {"end_at": end_at}),
        stranger("post", f"leases/{lease}/end"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert stranger("get", "leases").json()["results"] == []
    assert Lease.objects.get().state == "active"


def test_a_viewer_looks_and_does_not_rent(buyer: Organisation, island: Island) -> None:
    viewer = caller(buyer, Role.VIEWER)
    assert viewer("get", "leases").status_code == 200
    assert viewer("post", "leases/preview", wish(island)).status_code == 200
    assert viewer("post", "leases", wish(island)).status_code == 403


def test_the_islands_on_offer_are_public_filtered_and_say_what_is_free(
    client: Client, buyer: Organisation, django_assert_max_num_queries: Any
) -> None:
    now = database_now()
    cheap = make_island(price_uusd_per_gpu_hour=60, gpu_count=2, simulated=True)
    dear = make_island(available_until=now + timedelta(days=1))
    make_island(listed=False)
    make_island(state=IslandState.RETIRED)
    make_island(available_until=now - timedelta(minutes=1))
    offline = make_island(state=IslandState.REGISTERED)
    rent(buyer, island_id=dear.pk, gpus=3, end_at=now + timedelta(minutes=30), by="test", now=now)

    with django_assert_max_num_queries(5):
        found = client.get("/api/v1/islands-on-offer").json()
    assert [row["island_id"] for row in found["results"]] == [cheap.pk, *sorted([dear.pk, offline.pk])]
    by_id = {row["island_id"]: row for row in found["results"]}
    assert by_id[dear.pk]["free_gpus"] == 5
    assert by_id[dear.pk]["free_until"] is not None
    assert by_id[cheap.pk]["free_until"] is None
    for query, expected in (
        ({"simulated": "true"}, {cheap.pk}),
        ({"online": "false"}, {offline.pk}),
        ({"min_gpus": "3"}, {dear.pk, offline.pk}),
        ({"max_price_uusd_per_gpu_hour": "60"}, {cheap.pk}),
        ({"gpu": "H100", "country": "is"}, {cheap.pk, dear.pk, offline.pk}),
        ({"gpu": "A100"}, set()),
    ):
        assert {row["island_id"] for row in client.get("/api/v1/islands-on-offer", query).json()["results"]} == expected
    refused = client.get("/api/v1/islands-on-offer", {"gpus": "3"})
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "gpus")


def test_a_list_of_leases_costs_few_queries_whatever_it_finds(
    call: Call, buyer: Organisation, island: Island, django_assert_max_num_queries: Any
) -> None:
    for _ in range(5):
        leased(buyer, island)
    with django_assert_max_num_queries(6):
        assert len(call("get", "leases").json()["results"]) == 5
