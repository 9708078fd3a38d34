"""The sellers' REST face of the fleet: sites, islands, join tokens, agents, events."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.accounts.services import issue_key
from marketplace.core.clock import database_now
from marketplace.fleet.models import Agent, Island, IslandState, Site
from tests.marketplace.fleet import build

pytestmark = pytest.mark.django_db


class Caller:
    """An HTTP client with one organisation's key, which says JSON and brings a fresh idempotency key."""

    def __init__(self, actor: Actor, role: str = Role.MEMBER) -> None:
        self.actor = actor
        secret = issue_key(actor, name="api", role=role, now=database_now()).secret
        self.client = Client(headers={"Authorization": f"Bearer {secret}"})
        self.count = 0

    def send(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        self.count += 1
        headers = {"Idempotency-Key": key or f"call-{self.count}"}
        call = getattr(self.client, method)
        return call(f"/api/v1/{path}", body, content_type="application/json", headers=headers)

    def get(self, path: str) -> Any:
        return self.client.get(f"/api/v1/{path}")


@pytest.fixture
def seller(db: None) -> Caller:
    return Caller(build.seller())


def asked(site: Site | str, **more: Any) -> dict[str, Any]:
    site_id = site if isinstance(site, str) else site.pk
    wanted = {"site_id": site_id, "name": "north", "gpu": build.h100().pk, "gpu_count": 4}
    return {**wanted, "price_uusd_per_gpu_hour": 2_400_000, "simulated": True, **more}


def fields_of(answer: Any) -> list[str]:
    return [problem["field"] for problem in answer.json()["fields"]]


def test_a_site_and_an_island_are_registered_and_read_back(seller: Caller) -> None:
    site = seller.send("post", "sites", {"name": "Lisbon", "country": "pt"})
    assert site.status_code == 201
    assert site.json()["country"] == "PT"
    made = seller.send("post", "islands", asked(site.json()["id"]))
    assert made.status_code == 201
    assert made["Location"] == f"/api/v1/islands/{made.json()['id']}"
    read = seller.get(f"islands/{made.json()['id']}")
    assert read.json() == made.json()
    assert (read.json()["state"], read.json()["agent"], read.json()["wan_up_mbps"]) == ("registered", None, None)
    assert [each["id"] for each in seller.get("islands").json()["results"]] == [made.json()["id"]]
    assert seller.get("sites").json()["count"] == 1


def test_the_same_key_makes_one_island_and_other_words_under_it_are_refused(seller: Caller) -> None:
    site = seller.send("post", "sites", {"name": "Lisbon"}).json()["id"]
    first = seller.send("post", "islands", asked(site), key="k")
    again = seller.send("post", "islands", asked(site), key="k")
    other = seller.send("post", "islands", asked(site, name="south"), key="k")
    assert (first.json(), Island.objects.count()) == (again.json(), 1)
    assert other.status_code in (409, 422)
    assert other.json()["code"].startswith("idempotency")


def test_every_field_that_is_wrong_is_named(seller: Caller) -> None:
    site = seller.send("post", "sites", {"name": "Lisbon"}).json()["id"]
    odd = seller.send("post", "islands", asked(site, price_uusd_per_gpu_hour=2_400_001, gpu="h900", gpu_count=0))
    assert odd.status_code == 422
    assert "gpu_count" in fields_of(odd)
    odd = seller.send("post", "islands", asked(site, price_uusd_per_gpu_hour=2_400_001, gpu="h900"))
    assert set(fields_of(odd)) == {"price_uusd_per_gpu_hour", "gpu"}
    assert fields_of(seller.send("post", "islands", asked(site, colour="blue"))) == ["colour"]
    assert fields_of(seller.send("post", "islands", asked("sit_nowhere"))) == ["site_id"]
    assert not Island.objects.exists()


def test_terms_change_by_themselves_and_what_is_not_sent_stays(seller: Caller) -> None:
    island = build.island(seller.actor, wan_up_mbps=900)
    changed = seller.send("patch", f"islands/{island.pk}", {"price_uusd_per_gpu_hour": 3_000_000, "listed": False})
    assert changed.status_code == 200
    assert changed.json()["price_uusd_per_gpu_hour"] == 3_000_000
    assert (changed.json()["listed"], changed.json()["wan_up_mbps"]) == (False, 900)
    unstated = seller.send("patch", f"islands/{island.pk}", {"wan_up_mbps": None})
    assert unstated.json()["wan_up_mbps"] is None
    assert seller.send("patch", f"islands/{island.pk}", {"gpu_count": 9}).status_code == 422
    kinds = [each["kind"] for each in seller.get(f"islands/{island.pk}/events").json()["results"]]
    assert kinds == ["changed", "paused", "registered"]


def test_a_join_token_is_answered_with_the_commands_it_goes_into(seller: Caller) -> None:
    island = build.island(seller.actor)
    made = seller.send("post", f"islands/{island.pk}/join-tokens")
    assert made.status_code == 201
    assert made["Cache-Control"] == "no-store"
    install, enrol, run = made.json()["commands"]
    assert made.json()["token"] in enrol
    assert (install.split()[0], run) == ("pip", "archipelago-agent run")


def test_who_speaks_for_an_island_is_shown_and_can_be_revoked(seller: Caller) -> None:
    island = build.island(seller.actor)
    build.enrolled(seller.actor, island)
    shown = seller.get(f"islands/{island.pk}").json()["agent"]
    assert (shown["epoch"], shown["version"]) == (1, "0.1.0")
    assert seller.send("delete", f"islands/{island.pk}/agent").status_code == 204
    assert seller.get(f"islands/{island.pk}").json()["agent"] is None
    assert Agent.objects.get().revoked_at is not None


def test_a_retired_island_stays_readable_and_takes_no_changes(seller: Caller) -> None:
    island = build.island(seller.actor)
    assert seller.send("delete", f"islands/{island.pk}").json()["state"] == IslandState.RETIRED
    assert seller.send("delete", f"islands/{island.pk}").status_code == 200
    assert seller.get(f"islands/{island.pk}").json()["listed"] is False
    assert seller.send("patch", f"islands/{island.pk}", {"listed": True}).json()["code"] == "retired"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("get", "islands/{id}"),
        ("patch", "islands/{id}"),
        ("delete", "islands/{id}"),
        ("post", "islands/{id}/join-tokens"),
        ("delete", "islands/{id}/agent"),
        ("get", "islands/{id}/events"),
    ],
)
def test_another_organisations_island_is_not_there(seller: Caller, method: str, path: str) -> None:
    theirs = build.island(build.seller())
    there = path.format(id=theirs.pk)
    answer = seller.get(there) if method == "get" else seller.send(method, there, {})
    assert answer.status_code == 404
    assert answer.json()["code"] == "not_found"
    theirs.refresh_from_db()
    assert theirs.state == IslandState.REGISTERED


def test_another_organisations_site_cannot_be_built_on(seller: Caller) -> None:
    theirs = build.island(build.seller()).site
    assert fields_of(seller.send("post", "islands", asked(theirs))) == ["site_id"]


def test_a_key_that_may_only_look_changes_nothing(seller: Caller) -> None:
    island = build.island(seller.actor)
    viewer = Caller(seller.actor, Role.VIEWER)
    assert viewer.get(f"islands/{island.pk}").status_code == 200
    for method, path in (("patch", f"islands/{island.pk}"), ("post", f"islands/{island.pk}/join-tokens")):
        assert viewer.send(method, path, {}).status_code == 403
    assert viewer.send("post", "sites", {"name": "x"}).status_code == 403
    assert Client().get("/api/v1/islands").status_code == 401
