"""The pages of trading, as a signed-in person uses them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.models import Organisation, Role, User
from marketplace.accounts.services import ensure_organisation
from marketplace.billing.services.holds import deposit, hold
from marketplace.core.clock import database_now
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Lease, LeaseState
from marketplace.trading.services import rent
from tests.marketplace.trading.market import PRICE, USD, cash_uusd

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada(db: None) -> User:
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    ensure_organisation(user)
    return user


@pytest.fixture
def mine(ada: User) -> Organisation:
    organisation = ada.memberships.get().organisation
    deposit(organisation, 1_000 * USD, "pi_ada")
    return organisation


@pytest.fixture
def page(ada: User, client: Client) -> Client:
    client.force_login(ada, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


def typed(page: Client, island: Island, minutes: int = 60, **more: Any) -> dict[str, Any]:
    """What the form sends, with the ticket of a page that was really shown."""
    shown = page.get(f"/islands/{island.pk}/rent").content.decode()
    ticket = re.search(r'name="ticket" value="([^"]+)"', shown)
    assert ticket is not None
    end_at = (database_now() + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M")
    price = {"max_price_uusd_per_gpu_hour": PRICE}
    return {"ticket": ticket[1], "gpus": 2, "start_at": "", "end_at": end_at, **price, **more}


def in_hours(hours: float) -> Any:
    return database_now() + timedelta(hours=hours)


def test_renting_leads_to_the_lease(page: Client, mine: Organisation, island: Island) -> None:
    answer = page.post(f"/islands/{island.pk}/rent", typed(page, island), follow=True)
    lease = Lease.objects.get()
    assert answer.redirect_chain == [(f"/leases/{lease.pk}", 302)]
    shown = answer.content.decode()
    assert f"Rented: 2 GPUs of {island.name}." in shown
    assert "Receipts" in shown
    assert lease.created_by.startswith("user:")


def test_a_form_sent_twice_is_one_lease(page: Client, mine: Organisation, island: Island) -> None:
    form = typed(page, island)
    for _ in range(2):
        assert page.post(f"/islands/{island.pk}/rent", form).status_code == 302
    assert Lease.objects.count() == 1
    changed = page.post(f"/islands/{island.pk}/rent", {**form, "gpus": 3})
    assert changed.status_code == 409
    assert "other terms" in changed.content.decode()


def test_a_refusal_stands_at_its_field_and_keeps_what_was_typed(
    page: Client, mine: Organisation, island: Island
) -> None:
    answer = page.post(f"/islands/{island.pk}/rent", typed(page, island, gpus=9))
    shown = answer.content.decode()
    assert answer.status_code == 422
    assert "The island has 8" in shown
    assert 'value="9"' in shown
    assert not Lease.objects.exists()


def test_a_price_that_rose_since_the_page_was_shown_rents_nothing(
    page: Client, mine: Organisation, island: Island
) -> None:
    form = typed(page, island)
    Island.objects.filter(pk=island.pk).update(price_uusd_per_gpu_hour=2 * PRICE)
    answer = page.post(f"/islands/{island.pk}/rent", form)
    assert answer.status_code == 409
    assert "Nothing was rented" in answer.content.decode()
    assert cash_uusd(mine) == 1_000 * USD


def test_the_preview_says_the_cost_and_every_reason(page: Client, island: Island) -> None:
    form = typed(page, island, gpus=8, minutes=120)
    shown = page.get(f"/islands/{island.pk}/rent", form).content.decode()
    assert "Top up" in shown
    assert "8 of 8 GPUs" in shown
    nonsense = page.get(f"/islands/{island.pk}/rent", {**form, "end_at": "soon"})
    assert nonsense.status_code == 200
    assert "Enter a valid date/time" in nonsense.content.decode()


def test_the_pages_of_leases_say_what_to_do_when_there_are_none(page: Client) -> None:
    assert "See the market" in page.get("/leases").content.decode()


def test_a_lease_shows_its_window_and_refreshes_while_it_lives(
    page: Client, mine: Organisation, island: Island
) -> None:
    made = rent(mine, island_id=island.pk, gpus=2, end_at=in_hours(1), by="test", now=database_now())
    shown = page.get(f"/leases/{made.pk}").content.decode()
    assert 'hx-trigger="every 3s"' in shown
    part = page.get(f"/leases/{made.pk}", headers={"HX-Request": "true"}).content.decode()
    assert part.startswith('<div id="lease"')
    assert "<html" not in part
    assert island.name in page.get("/leases").content.decode()


def test_extending_and_ending_from_the_page(page: Client, mine: Organisation, island: Island) -> None:
    made = rent(mine, island_id=island.pk, gpus=1, end_at=in_hours(1), by="test", now=database_now())
    refused = page.post(f"/leases/{made.pk}/extend", {"end_at": in_hours(0.5).strftime("%Y-%m-%dT%H:%M")})
    assert refused.status_code == 422
    assert "before the lease" in refused.content.decode()
    later = page.post(f"/leases/{made.pk}/extend", {"end_at": in_hours(2).strftime("%Y-%m-%dT%H:%M")}, follow=True)
    assert "Extended until" in later.content.decode()

    ended = page.post(f"/leases/{made.pk}/end", follow=True).content.decode()
    made.refresh_from_db()
    assert made.state == LeaseState.ENDED
    assert "given back" in ended
    assert "Yes, end it" not in ended


def test_a_lease_of_a_job_is_not_ended_by_hand(page: Client, mine: Organisation, island: Island) -> None:
    hold("job_1", mine, 100 * USD)
    made = rent(
        mine,
        island_id=island.pk,
        gpus=1,
        end_at=in_hours(1),
        purpose="job",
        job_ref="job_1",
        by="scheduler",
        now=database_now(),
    )
    answer = page.post(f"/leases/{made.pk}/end")
    assert answer.status_code == 409
    assert "cancel the job" in answer.content.decode()
    assert "Yes, end it" not in page.get(f"/leases/{made.pk}").content.decode()


def test_another_organisations_lease_is_not_found(page: Client, buyer: Organisation, island: Island) -> None:
    made = rent(buyer, island_id=island.pk, gpus=1, end_at=in_hours(1), by="test", now=database_now())
    assert page.get(f"/leases/{made.pk}").status_code == 404
    assert page.post(f"/leases/{made.pk}/end").status_code == 404
    assert page.post(f"/leases/{made.pk}/extend", {"end_at": "2030-01-01T00:00"}).status_code == 404
    made.refresh_from_db()
    assert made.state == LeaseState.ACTIVE


def test_a_viewer_rents_nothing(ada: User, page: Client, mine: Organisation, island: Island) -> None:
    form = typed(page, island)
    ada.memberships.update(role=Role.VIEWER)
    assert page.post(f"/islands/{island.pk}/rent", form).status_code == 403
    assert "does not rent" in page.get(f"/islands/{island.pk}/rent").content.decode()


def test_the_market_page_shows_our_own_islands_first(client: Client, island: Island) -> None:
    shown = client.get("/market").content.decode()
    assert shown.index(island.name) < shown.index("List prices")
    assert f"/islands/{island.pk}/rent" in shown
    Island.objects.filter(pk=island.pk).update(state=IslandState.LOST)
    shown = client.get("/market").content.decode()
    assert f"/islands/{island.pk}/rent" not in shown
    assert "Not shown: 1 whose agent is not heard" in shown


def test_a_settled_lease_shows_what_was_returned(page: Client, mine: Organisation, island: Island) -> None:
    made = rent(
        mine, island_id=island.pk, gpus=1, start_at=in_hours(1), end_at=in_hours(2), by="test", now=database_now()
    )
    shown = page.post(f"/leases/{made.pk}/end", follow=True).content.decode()
    assert "Returned" in shown
    assert "cancelled" in shown.lower()
    assert cash_uusd(mine) == 1_000 * USD
