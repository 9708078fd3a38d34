"""The pages of orders: bidding with what it would do beside it, the list, and one order as it fills."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.core.clock import database_now
from marketplace.fleet.models import Island
from marketplace.trading.models import Order, OrderState
from marketplace.trading.services import rent, sweep_orders
from tests.marketplace.trading.market import PRICE, USD, cash_uusd, make_island
from tests.marketplace.training.people import customer, signed_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada(db: None) -> Actor:
    return customer(dollars=1_000)


@pytest.fixture
def page(ada: Actor, client: Client) -> Client:
    return signed_in(ada, client)


@pytest.fixture
def island(db: None) -> Island:
    return make_island(name="fjord")


def typed(page: Client, **more: str) -> dict[str, str]:
    """What a form that was shown sends."""
    ticket = re.search(r'name="ticket" value="([^"]+)"', page.get("/orders/new").content.decode())
    assert ticket is not None
    end_at = (database_now() + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M")
    given = {"gpu": "h100-sxm-80g", "gpus": "2", "start_at": "", "end_at": end_at, "hours": "", "limit": "2.40"}
    return {"ticket": ticket[1], **given, "colocation": "same_island", "tif": "gtc", **more}


def test_an_order_leads_to_its_leases(page: Client, ada: Actor, island: Island) -> None:
    answer = page.post("/orders/new", typed(page), follow=True)
    order = Order.objects.get()
    assert answer.redirect_chain == [(f"/orders/{order.pk}", 302)]
    shown = answer.content.decode()
    assert "Filled: the leases stand below." in shown
    assert f"/leases/{order.leases.get().pk}" in shown
    assert "hx-get" not in shown[shown.index('id="order"') :]
    listed = page.get("/orders").content.decode()
    assert f"/orders/{order.pk}" in listed
    assert "100 %" in listed


def test_an_order_that_waits_is_filled_under_the_eyes_of_who_looks(page: Client, ada: Actor, island: Island) -> None:
    page.post("/orders/new", typed(page, limit="1.00"))
    order = Order.objects.get()
    shown = page.get(f"/orders/{order.pk}").content.decode()
    assert "Still wanted: 2 GPUs" in shown
    assert 'hx-trigger="every 3s"' in shown
    Island.objects.update(price_uusd_per_gpu_hour=960_000)
    sweep_orders(database_now())
    assert "100 %" in page.get(f"/orders/{order.pk}").content.decode()


def test_the_preview_says_what_would_be_rented_and_writes_nothing(page: Client, ada: Actor, island: Island) -> None:
    shown = page.post("/orders/preview", typed(page)).content.decode()
    assert "fjord" in shown
    assert "on average" in shown
    waits = page.post("/orders/preview", typed(page, limit="1.00")).content.decode()
    assert "it would wait for it" in waits
    poor = page.post("/orders/preview", typed(page, limit="900")).content.decode()
    assert "more is needed on your account" in poor
    empty = page.post("/orders/preview", typed(page, gpus="")).content.decode()
    assert "Say what you want" in empty
    assert not Order.objects.exists()


def test_a_refused_form_keeps_what_was_typed_and_marks_the_field(page: Client, island: Island) -> None:
    for name, value, words in (
        ("limit", "a lot", "not an amount of dollars"),
        ("gpus", "0", "greater than or equal to 1"),
        ("hours", "99", "within the window"),
        ("end_at", "2020-01-01T00:00", "later than the start"),
    ):
        answer = page.post("/orders/new", typed(page, **{name: value}))
        shown = answer.content.decode()
        assert answer.status_code == 422
        field = re.search(rf'class="field wrong">\s*<label for="id_{name}".*?</div>', shown, re.S)
        assert field is not None, name
        assert words in field[0].lower()
        assert f'value="{value}"' in field[0]
    assert page.post("/orders/new", typed(page, limit="900")).status_code == 402
    assert not Order.objects.exists()


def test_a_form_sent_twice_is_one_order(page: Client, ada: Actor, island: Island) -> None:
    form = typed(page)
    first, again = page.post("/orders/new", form), page.post("/orders/new", form)
    assert first["Location"] == again["Location"]
    minutes = sum(lease.end_min - lease.start_min for lease in Order.objects.get().leases.all())
    assert cash_uusd(ada.organisation) == 1_000 * USD - PRICE * 2 * minutes // 60


def test_an_order_is_cancelled_by_its_button_once(page: Client, ada: Actor, island: Island) -> None:
    page.post("/orders/new", typed(page, limit="1.00"))
    order = Order.objects.get()
    assert "back in your cash" in page.post(f"/orders/{order.pk}/cancel", follow=True).content.decode()
    assert cash_uusd(ada.organisation) == 1_000 * USD
    page.post("/orders/new", typed(page))
    filled = Order.objects.get(state=OrderState.FILLED)
    assert "filled before" in page.post(f"/orders/{filled.pk}/cancel", follow=True).content.decode()


def test_another_organisations_order_is_not_there(page: Client, island: Island) -> None:
    stranger = signed_in(customer(), Client())
    page.post("/orders/new", typed(page, limit="1.00"))
    order = Order.objects.get()
    assert stranger.get(f"/orders/{order.pk}").status_code == 404
    assert stranger.post(f"/orders/{order.pk}/cancel").status_code == 404
    assert "No order yet" in stranger.get("/orders").content.decode()


def test_who_may_only_look_places_and_cancels_nothing(page: Client, ada: Actor, island: Island) -> None:
    page.post("/orders/new", typed(page, limit="1.00"))
    order = Order.objects.get()
    form = typed(page)
    ada.organisation.memberships.update(role=Role.VIEWER)
    assert "Cancel the order" not in page.get(f"/orders/{order.pk}").content.decode()
    assert page.post(f"/orders/{order.pk}/cancel").status_code == 403
    assert page.post("/orders/new", form).status_code == 403
    assert Order.objects.get().state == OrderState.OPEN


def test_the_money_page_says_what_an_order_holds_and_leads_to_it(page: Client, island: Island) -> None:
    page.post("/orders/new", typed(page, limit="1.00"))
    order = Order.objects.get()
    shown = page.get("/money").content.decode()
    assert f'Order <a class="mono wraps" href="/orders/{order.pk}">' in shown


def test_a_part_of_a_lease_is_put_up_for_sale_seen_and_taken_back(page: Client, ada: Actor, island: Island) -> None:
    lease = rent(ada.organisation, island_id=island.pk, gpus=4, end_at=later(6), by="t", now=database_now())
    shown = page.get(f"/leases/{lease.pk}").content.decode()
    assert f"/leases/{lease.pk}/sell" in shown
    form = page.get(f"/leases/{lease.pk}/sell").content.decode()
    ticket = re.search(r'name="ticket" value="([^"]+)"', form)
    assert ticket is not None
    typed = {"ticket": ticket[1], "gpus": "2", "price": "1.20", "start_at": "", "end_at": "", "block": "60"}

    preview = page.post(f"/leases/{lease.pk}/sell/preview", typed).content.decode()
    assert "You earn" in preview
    assert not Order.objects.exists()
    for _ in range(2):
        answer = page.post(f"/leases/{lease.pk}/sell", typed, follow=True)
    sale = Order.objects.get()
    assert answer.redirect_chain == [(f"/orders/{sale.pk}", 302)]
    assert "For sale" in answer.content.decode()
    assert "Of it for sale" in page.get(f"/leases/{lease.pk}").content.decode()
    assert "for sale" in page.get("/orders").content.decode()
    assert "Taken back" in page.post(f"/orders/{sale.pk}/cancel", follow=True).content.decode()


def test_a_sale_that_is_refused_comes_back_as_typed(page: Client, ada: Actor, island: Island) -> None:
    lease = rent(ada.organisation, island_id=island.pk, gpus=4, end_at=later(6), by="t", now=database_now())
    typed = {"gpus": "5", "price": "1.20", "start_at": "", "end_at": "", "block": "60"}
    answer = page.post(f"/leases/{lease.pk}/sell", typed)
    shown = answer.content.decode()
    assert answer.status_code == 422
    assert 'value="5"' in shown
    assert "From 1 to 4" in shown
    assert page.get("/leases/lse_nobody/sell").status_code == 404


def test_the_price_of_an_order_is_changed_by_another_in_its_place(page: Client, ada: Actor, island: Island) -> None:
    Island.objects.update(price_uusd_per_gpu_hour=2 * PRICE)
    page.post("/orders/new", typed(page))
    first = Order.objects.get()
    assert page.post(f"/orders/{first.pk}/amend", {"limit": "nothing"}).status_code == 422
    answer = page.post(f"/orders/{first.pk}/amend", {"limit": "4.80"}, follow=True)
    second = Order.objects.exclude(pk=first.pk).get()
    assert answer.redirect_chain == [(f"/orders/{second.pk}", 302)]
    assert second.state == OrderState.FILLED


def later(hours: float) -> datetime:
    return database_now() + timedelta(hours=hours)
