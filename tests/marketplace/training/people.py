"""Organisations with money, and what they call the API with."""

from __future__ import annotations

from itertools import count
from typing import Any

from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.accounts.services import issue_key
from marketplace.billing.services.holds import deposit
from marketplace.core.clock import database_now
from tests.marketplace.fleet import build

USD = 1_000_000
_calls = count(1)
GPT = {"kind": "gpt", "n_layer": 2, "n_head": 4, "d_model": 64, "context": 64}


def asked(**more: Any) -> dict[str, Any]:
    return {"name": "run", "model": GPT, "tokens": 1_000_000, "budget_uusd": 20 * USD, **more}


def customer(dollars: int = 100) -> Actor:
    actor = build.seller()
    if dollars:
        deposit(actor.organisation, dollars * USD, f"pi_{actor.organisation.pk}")
    return actor


def signed_in(actor: Actor, client: Client) -> Client:
    user = actor.organisation.memberships.get().user
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


class Caller:
    """An HTTP client with one organisation's key; a write brings an idempotency key of its own."""

    def __init__(self, actor: Actor, role: str = Role.MEMBER) -> None:
        self.actor = actor
        secret = issue_key(actor, name="api", role=role, now=database_now()).secret
        self.client = Client(headers={"Authorization": f"Bearer {secret}"})

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(f"/api/v1/{path}", query)

    def post(self, path: str, body: Any = None, key: str = "") -> Any:
        headers = {"Idempotency-Key": key or f"call-{next(_calls)}"}
        return self.client.post(f"/api/v1/{path}", body or {}, content_type="application/json", headers=headers)


def fields_of(answer: Any) -> list[str]:
    return [problem["field"] for problem in answer.json()["fields"]]
