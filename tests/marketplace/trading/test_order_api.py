"""Orders over REST."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.models import Role
from marketplace.core.clock import database_now
from marketplace.fleet.models import IslandState
from marketplace.trading.models import Order
from tests.marketplace.trading.market import PRICE, USD, cash_uusd, make_island
from tests.marketplace.training.people import Caller, customer, fields_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def buyer(db: None) -> Caller:
    make_island(state=IslandState.RETIRED)
    return Caller(customer(dollars=1_000))


def asked(hours: float = 1, **more: Any) -> dict[str, Any]:
    end = database_now() + timedelta(hours=hours)
    body = {"gpus": 2, "end_at": end.isoformat(), "limit_uusd_per_gpu_hour": PRICE}
    return {**body, **({} if "island_id" in more else {"gpu": "h100-sxm-80g"}), **more}


def test_an_order_is_placed_filled_and_read_back_with_its_leases(buyer: Caller) -> None:
    island = make_island()
    made = buyer.post("orders", asked())
    assert made.status_code == 201
    body = made.json()
    assert made["Location"] == f"/api/v1/orders/{body['id']}"
    assert (body["state"], body["held_uusd"], body["wanted"]) == ("filled", 0, [])
    (lease,) = body["leases"]
    assert (lease["island"]["id"], lease["gpus"], lease["state"]) == (island.pk, 2, "active")
    assert buyer.get(f"orders/{body['id']}").json() == body
    assert [each["id"] for each in buyer.get("orders").json()["results"]] == [body["id"]]
    assert buyer.get("leases").json()["results"][0]["id"] == lease["id"]


def test_an_order_that_stands_is_listed_and_cancelled_with_its_money_back(buyer: Caller) -> None:
    order = buyer.post("orders", asked()).json()
    assert (order["state"], order["wanted"][0]["gpus"]) == ("open", 2)
    assert order["held_uusd"] == 1_000 * USD - cash_uusd(buyer.actor.organisation) > 0
    assert buyer.get("orders", state="open").json()["count"] == 1
    for _ in range(2):
        assert buyer.post(f"orders/{order['id']}/cancel").json()["state"] == "cancelled"
    assert cash_uusd(buyer.actor.organisation) == 1_000 * USD
    assert buyer.get("orders", state="open").json()["count"] == 0


def test_a_preview_is_what_placing_does(buyer: Caller) -> None:
    island = make_island()
    seen = buyer.post("orders/preview", asked()).json()
    assert [(each["island_id"], each["gpus"]) for each in seen["leases"]] == [(island.pk, 2)]
    assert seen["average_uusd_per_gpu_hour"] == PRICE
    assert not Order.objects.exists()
    order = buyer.post("orders", asked()).json()
    assert 1_000 * USD - cash_uusd(buyer.actor.organisation) == seen["cost_uusd"]
    times = [(each["start_at"], each["end_at"]) for each in order["leases"]]
    assert times == [(each["start_at"], each["end_at"]) for each in seen["leases"]]
    assert all(datetime.fromisoformat(start) < datetime.fromisoformat(end) for start, end in times)


def test_the_same_key_is_one_order_and_mistakes_are_named(buyer: Caller) -> None:
    body = asked()
    first, again = buyer.post("orders", body, key="k"), buyer.post("orders", body, key="k")
    assert first.json() == again.json()
    assert Order.objects.count() == 1
    assert fields_of(buyer.post("orders", asked(gpus=0, tif="day"))) == ["gpus", "tif"]
    assert fields_of(buyer.post("orders", asked(colour="blue"))) == ["colour"]
    assert fields_of(buyer.post("orders", asked(limit_uusd_per_gpu_hour=61))) == ["limit_uusd_per_gpu_hour"]
    assert fields_of(buyer.post("orders/preview", asked(hours=-1))) == ["end_at"]
    dear = buyer.post("orders", asked(hours=24 * 300))
    assert (dear.status_code, dear.json()["code"]) == (402, "insufficient_funds")


def test_another_organisations_order_is_not_there(buyer: Caller) -> None:
    order = buyer.post("orders", asked()).json()["id"]
    stranger = Caller(customer())
    assert stranger.get(f"orders/{order}").status_code == 404
    assert stranger.post(f"orders/{order}/cancel").status_code == 404
    assert stranger.get("orders").json()["count"] == 0
    assert Order.objects.get().state == "open"


def test_a_key_that_may_only_look_previews_and_places_nothing(buyer: Caller) -> None:
    viewer = Caller(buyer.actor, Role.VIEWER)
    assert viewer.post("orders/preview", asked()).status_code == 200
    assert viewer.post("orders", asked()).status_code == 403
    assert Client().get("/api/v1/orders").status_code == 401
    assert not Order.objects.exists()
