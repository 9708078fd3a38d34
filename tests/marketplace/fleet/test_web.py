"""A seller's pages: my islands, one island, and the forms that make them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.fleet.models import Agent, Island, IslandState, JoinToken, Site
from tests.marketplace.fleet import build

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada(db: None) -> Actor:
    return build.seller()


@pytest.fixture
def page(ada: Actor, client: Client) -> Client:
    return signed_in(ada, client)


def signed_in(actor: Actor, client: Client) -> Client:
    user = actor.organisation.memberships.get().user
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


def typed(**more: Any) -> dict[str, Any]:
    new = {"site": "new", "site_name": "Lisbon", "country": "pt", "name": "north", "gpu": build.h100().pk}
    terms = {"gpu_count": 4, "gpus_per_lot": 1, "price": "2.40", "min_lease_min": 1}
    return {**new, **terms, "simulated": "on", **more}


def test_nobody_in_particular_is_asked_to_sign_in(client: Client) -> None:
    assert client.get("/islands")["Location"].startswith("/accounts/login/")


def test_with_no_island_the_page_says_what_to_do(page: Client) -> None:
    shown = page.get("/islands").content.decode()
    assert "No island yet" in shown
    assert "/islands/new" in shown


def test_site_and_island_are_registered_in_one_form(page: Client) -> None:
    answer = page.post("/islands/new", typed(), follow=True)
    island = Island.objects.get()
    assert answer.redirect_chain == [(f"/islands/{island.pk}", 302)]
    assert (island.site.name, island.site.country, island.price_uusd_per_gpu_hour) == ("Lisbon", "PT", 2_400_000)
    shown = answer.content.decode()
    assert "No agent has reported yet" in shown
    assert "4 × H100 SXM 80 GB registered" in shown
    assert "0 of 4 GPUs" in shown
    listed = page.get("/islands").content.decode()
    assert f"/islands/{island.pk}" in listed
    assert "$2.40" in listed


def test_a_refused_form_keeps_what_was_typed_and_marks_the_field(page: Client) -> None:
    answer = page.post("/islands/new", typed(price="a lot", name="my island"))
    shown = answer.content.decode()
    assert answer.status_code == 422
    assert 'value="my island"' in shown
    assert re.search(r'class="field wrong">\s*<label for="id_price"', shown)
    assert not Site.objects.exists()


def test_a_name_that_is_taken_makes_no_second_site_either(page: Client) -> None:
    page.post("/islands/new", typed())
    site = Site.objects.get()
    answer = page.post("/islands/new", typed(site=site.pk))
    assert answer.status_code == 409
    assert "This site has an island of this name" in answer.content.decode()
    again = page.post("/islands/new", typed(name="south"))
    assert again.status_code == 409
    assert "You have a site of this name" in again.content.decode()
    assert (Site.objects.count(), Island.objects.count()) == (1, 1)


def test_a_new_site_needs_a_name(page: Client) -> None:
    assert "a new site needs a name" in page.post("/islands/new", typed(site_name="")).content.decode().lower()


def test_a_join_token_is_shown_once(page: Client, ada: Actor) -> None:
    island = build.island(ada)
    answer = page.post(f"/islands/{island.pk}/join-token")
    shown = answer.content.decode()
    assert answer.status_code == 201
    token = re.search(r"--token (\S+)", shown)
    assert token is not None
    assert "no-store" in answer["Cache-Control"]
    assert token[1] not in page.get(f"/islands/{island.pk}").content.decode()
    assert JoinToken.objects.count() == 1
    reply = build.services.enrol(build.enrol_request(token[1]), build.NOW)
    assert reply.island_id == island.pk


def test_the_live_part_says_what_the_agent_sees(page: Client, ada: Actor) -> None:
    island = build.island(ada)
    build.enrolled(ada, island)
    shown = page.get(f"/islands/{island.pk}/live").content.decode()
    assert "node-1" in shown
    assert "4, simulated" in shown
    assert "<html" not in shown


def test_changed_terms_are_kept_and_refused_ones_come_back(page: Client, ada: Actor) -> None:
    island = build.island(ada)
    terms = {"price": "3", "min_lease_min": 5, "available_from": "2026-06-01T12:00", "wan_up_mbps": ""}
    answer = page.post(f"/islands/{island.pk}/terms", terms, follow=True)
    assert "Changed: $3.00 a GPU-hour" in answer.content.decode()
    refused = page.post(f"/islands/{island.pk}/terms", {**terms, "available_until": "2026-05-01T12:00"})
    assert refused.status_code == 422
    assert "2026-05-01T12:00" in refused.content.decode()
    island.refresh_from_db()
    assert (island.price_uusd_per_gpu_hour, island.min_lease_min, island.available_until) == (3_000_000, 5, None)


def test_the_buttons_do_what_they_say(page: Client, ada: Actor) -> None:
    island = build.island(ada)
    build.enrolled(ada, island)
    page.post(f"/islands/{island.pk}/unlist")
    island.refresh_from_db()
    assert not island.listed
    page.post(f"/islands/{island.pk}/list")
    assert "new credential" in page.post(f"/islands/{island.pk}/rotate", follow=True).content.decode()
    page.post(f"/islands/{island.pk}/revoke")
    assert Agent.objects.get().revoked_at is not None
    answer = page.post(f"/islands/{island.pk}/retire", follow=True)
    assert answer.redirect_chain == [("/islands", 302)]
    island.refresh_from_db()
    assert (island.state, island.listed) == (IslandState.RETIRED, False)


@pytest.mark.parametrize("action", ["", "/live", "/join-token", "/terms", "/list", "/rotate", "/revoke", "/retire"])
def test_another_organisations_island_is_not_there(page: Client, action: str) -> None:
    theirs = build.island(build.seller())
    call = page.get if action in ("", "/live") else page.post
    answer = call(f"/islands/{theirs.pk}{action}", follow=True)
    assert answer.status_code == 404
    theirs.refresh_from_db()
    assert theirs.state == IslandState.REGISTERED
    assert not JoinToken.objects.exists()


def test_who_may_only_look_sees_no_buttons_and_can_press_none(client: Client) -> None:
    actor = build.seller(role=Role.OWNER)
    island = build.island(actor)
    actor.organisation.memberships.update(role=Role.VIEWER)
    page = signed_in(actor, client)
    assert "Make a join token" not in page.get(f"/islands/{island.pk}").content.decode()
    page.post(f"/islands/{island.pk}/retire")
    island.refresh_from_db()
    assert island.state == IslandState.REGISTERED
    assert page.post("/islands/new", typed()).status_code == 403


def test_an_island_whose_agent_was_stopped_is_not_shown_as_lost(page: Client, ada: Actor) -> None:
    island = build.island(ada)
    build.enrolled(ada, island)
    Island.objects.update(state=IslandState.LOST)
    assert "Lost" in page.get("/islands").content.decode()
    Agent.objects.update(draining=True)
    for path in ("/islands", f"/islands/{island.pk}"):
        shown = page.get(path).content.decode()
        assert "Stopped" in shown
        assert "Lost" not in shown
