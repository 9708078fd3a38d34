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


def rented(buyer: Caller, hours: float = 6, gpus: int = 2) -> str:
    island = make_island()
    body = {"island_id": island.pk, "gpus": gpus, "end_at": (database_now() + timedelta(hours=hours)).isoformat()}
    return str(buyer.post("leases", body).json()["id"])


def offered(lease_id: str, **more: Any) -> dict[str, Any]:
    return {"side": "sell", "lease_id": lease_id, "gpus": 1, "limit_uusd_per_gpu_hour": PRICE // 2, **more}


def test_a_part_of_a_lease_is_previewed_put_up_for_sale_and_bought_by_another(buyer: Caller) -> None:
    lease_id = rented(buyer)
    seen = buyer.post("orders/preview", offered(lease_id)).json()
    assert seen["proceeds"]["net_uusd"] == seen["proceeds"]["gross_uusd"] - seen["proceeds"]["fee_uusd"] > 0
    assert seen["quote_id"] is None
    sale = buyer.post("orders", offered(lease_id)).json()
    assert (sale["side"], sale["state"], sale["lease_id"], sale["held_uusd"]) == ("sell", "open", lease_id, 0)
    assert [part["gpus"] for part in sale["offered"]] == [1]
    assert buyer.get("orders", side="buy").json()["count"] == 0

    other = Caller(customer(dollars=1_000))
    start = (database_now() + timedelta(hours=2)).isoformat()
    bid = other.post("orders", asked(4, gpus=1, start_at=start, limit_uusd_per_gpu_hour=PRICE // 2)).json()

    assert bid["state"] == "filled"
    after = buyer.get(f"orders/{sale['id']}").json()
    assert [part["gpus"] for part in after["sold"]] == [1]
    assert len(after["offered"]) == 2  # before and after what was bought


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"lease_id": ""}, "lease_id"),
        ({"tif": "ioc"}, "tif"),
        ({"gpus": 3}, "gpus"),
        ({"limit_uusd_per_gpu_hour": 61}, "limit_uusd_per_gpu_hour"),
        ({"start_at": "2020-01-01T00:00:00Z"}, "start_at"),
        ({"end_at": "2090-01-01T00:00:00Z"}, "end_at"),
    ],
)
def test_a_sale_that_cannot_be_names_its_field(buyer: Caller, wrong: dict[str, Any], field: str) -> None:
    refused = buyer.post("orders", {**offered(rented(buyer)), **wrong})
    assert refused.status_code == 422
    assert field in fields_of(refused)
    assert not Order.objects.exists()


def test_a_quote_is_kept_or_nothing_is_placed(buyer: Caller) -> None:
    island = make_island()
    body = asked(tif="gtc", limit_uusd_per_gpu_hour=2 * PRICE)
    quote = buyer.post("orders/preview", body).json()["quote_id"]
    island.price_uusd_per_gpu_hour = PRICE + 60
    island.save(update_fields=["price_uusd_per_gpu_hour"])

    moved = buyer.post("orders", {**body, "quote_id": quote})
    assert (moved.status_code, moved.json()["code"]) == (409, "quote_moved")
    assert cash_uusd(buyer.actor.organisation) == 1_000 * USD
    assert not Order.objects.exists()

    island.price_uusd_per_gpu_hour = PRICE - 60
    island.save(update_fields=["price_uusd_per_gpu_hour"])
    assert buyer.post("orders", {**body, "quote_id": quote}).json()["state"] == "filled"


def test_a_quote_is_for_one_order_of_one_organisation(buyer: Caller) -> None:
    make_island()
    body = asked()
    quote = buyer.post("orders/preview", body).json()["quote_id"]
    other = Caller(customer(dollars=1_000))
    for caller, sent in ((buyer, {**body, "gpus": 1, "quote_id": quote}), (other, {**body, "quote_id": quote})):
        refused = caller.post("orders", sent)
        assert (refused.status_code, fields_of(refused)) == (422, ["quote_id"])
    assert fields_of(buyer.post("orders", {**body, "quote_id": "forged"})) == ["quote_id"]


def test_another_price_is_another_order_in_the_place_of_the_first(buyer: Caller) -> None:
    first = buyer.post("orders", asked(limit_uusd_per_gpu_hour=PRICE - 60)).json()
    second = buyer.post(f"orders/{first['id']}/amend", {"limit_uusd_per_gpu_hour": PRICE}).json()

    assert (second["replaces"], second["state"], second["limit_uusd_per_gpu_hour"]) == (first["id"], "open", PRICE)
    assert second["wanted"] == first["wanted"]
    old = buyer.get(f"orders/{first['id']}").json()
    assert (old["state"], old["held_uusd"]) == ("cancelled", 0)
    assert cash_uusd(buyer.actor.organisation) == 1_000 * USD - second["held_uusd"]
    again = buyer.post(f"orders/{first['id']}/amend", {"limit_uusd_per_gpu_hour": PRICE})
    assert (again.status_code, again.json()["code"]) == (409, "order_closed")
    assert fields_of(buyer.post(f"orders/{second['id']}/amend", {})) == ["limit_uusd_per_gpu_hour"]


def test_a_sale_is_amended_like_a_bid(buyer: Caller) -> None:
    first = buyer.post("orders", offered(rented(buyer))).json()
    second = buyer.post(f"orders/{first['id']}/amend", {"limit_uusd_per_gpu_hour": PRICE}).json()
    assert (second["side"], second["offered"]) == ("sell", first["offered"])
    assert buyer.get(f"orders/{first['id']}").json()["offered"] == []
