from __future__ import annotations

from django.test import Client
from rest_framework.test import APIClient

from marketplace.accounts import services
from marketplace.accounts.access import Actor
from marketplace.accounts.models import ApiKey, Role, User
from marketplace.core.clock import database_now


def with_key(secret: str) -> APIClient:
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return api


def test_a_key_acts_for_its_organisation(owner: Actor) -> None:
    issued = services.issue_key(owner, name="ci", now=database_now())
    answer = with_key(issued.secret).get("/api/v1/me")
    assert answer.status_code == 200
    assert answer.json() == {
        "organisation": {"id": owner.organisation.id, "name": "ada"},
        "role": "member",
        "actor": f"key:{issued.key.id}",
    }
    assert ApiKey.objects.get().last_used_at is not None


def test_a_revoked_or_unknown_key_is_401_and_says_no_more(owner: Actor) -> None:
    issued = services.issue_key(owner, name="ci", now=database_now())
    services.revoke_key(owner, issued.key.id, now=database_now())
    answers = [with_key(secret).get("/api/v1/me") for secret in (issued.secret, "arc_nonsense")]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].json() == answers[1].json()


def test_nobody_is_401(db: None) -> None:
    assert APIClient().get("/api/v1/me").status_code == 401


def test_a_key_goes_before_the_session_of_the_same_request(signed_in: Client, owner: Actor) -> None:
    eve = User.objects.create_user("eve@example.org")
    services.ensure_organisation(eve)
    theirs = Actor.of_membership(eve.memberships.get())
    issued = services.issue_key(theirs, name="ci", now=database_now())
    answer = signed_in.get("/api/v1/me", headers={"Authorization": f"Bearer {issued.secret}"})
    assert answer.json()["organisation"]["id"] == theirs.organisation.id


def test_an_admins_key_issues_lists_and_revokes_keys(owner: Actor) -> None:
    api = with_key(services.issue_key(owner, name="ops", role=Role.ADMIN, now=database_now()).secret)
    made = api.post("/api/v1/api-keys", {"name": "worker", "role": "viewer", "expires_in_days": 7})
    assert made.status_code == 201
    assert made["Cache-Control"] == "no-store"
    secret = made.json()["secret"]
    listed = api.get("/api/v1/api-keys")
    assert [item["name"] for item in listed.json()["items"]] == ["worker", "ops"]
    assert secret not in listed.content.decode()
    assert with_key(secret).get("/api/v1/api-keys").status_code == 403
    assert api.delete(f"/api/v1/api-keys/{made.json()['id']}").status_code == 204
    assert with_key(secret).get("/api/v1/me").status_code == 401


def test_a_session_does_not_become_a_lasting_key(signed_in: Client) -> None:
    answer = signed_in.post("/api/v1/api-keys", {"name": "x"}, content_type="application/json")
    assert answer.status_code == 403
    assert ApiKey.objects.count() == 0
