from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection
from django.test import RequestFactory
from rest_framework.response import Response

from marketplace.accounts.access import Actor
from marketplace.accounts.idempotency import hash_body, idempotent
from marketplace.accounts.models import IdempotencyRecord, User
from marketplace.accounts.services import ensure_organisation
from marketplace.core.errors import Conflict, InvalidInput


def request_of(actor: Actor, key: str | None) -> Any:
    request: Any = RequestFactory().post("/", headers={} if key is None else {"Idempotency-Key": key})
    request.actor = actor
    return request


class Counter:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Response:
        self.runs += 1
        return Response({"run": self.runs}, status=201)


def test_a_retry_gets_the_first_answer(owner: Actor) -> None:
    work = Counter()
    first, again = (idempotent(request_of(owner, "k"), "jobs", {"a": 1}, work) for _ in range(2))
    assert (first.status_code, first.data) == (again.status_code, again.data) == (201, {"run": 1})
    assert "Idempotency-Replayed" not in first
    assert again["Idempotency-Replayed"] == "true"


def test_the_same_key_with_another_body_is_refused(owner: Actor) -> None:
    work = Counter()
    idempotent(request_of(owner, "k"), "jobs", {"a": 1}, work)
    with pytest.raises(InvalidInput) as caught:
        idempotent(request_of(owner, "k"), "jobs", {"a": 2}, work)
    assert caught.value.code == "idempotency_key_reused"
    assert work.runs == 1


def test_a_key_is_known_to_its_route_and_organisation_only(owner: Actor) -> None:
    eve = User.objects.create_user("eve@example.org")
    ensure_organisation(eve)
    work = Counter()
    idempotent(request_of(owner, "k"), "jobs", {}, work)
    idempotent(request_of(owner, "k"), "leases", {}, work)
    idempotent(request_of(Actor.of_membership(eve.memberships.get()), "k"), "jobs", {}, work)
    assert work.runs == 3


@pytest.mark.parametrize("key", [None, "", " ", "x" * 201, "é"])
def test_a_key_is_needed_and_plain(owner: Actor, key: str | None) -> None:
    with pytest.raises(InvalidInput):
        idempotent(request_of(owner, key), "jobs", {}, Counter())


def test_a_refusal_is_not_stored(owner: Actor) -> None:
    def refuse() -> Response:
        raise Conflict("sold out")

    with pytest.raises(Conflict):
        idempotent(request_of(owner, "k"), "jobs", {}, refuse)
    assert IdempotencyRecord.objects.count() == 0
    assert idempotent(request_of(owner, "k"), "jobs", {}, Counter()).data == {"run": 1}


def test_a_body_is_the_same_whatever_the_order_of_its_fields() -> None:
    assert hash_body({"a": 1, "b": [1, 2]}) == hash_body({"b": [1, 2], "a": 1}) != hash_body({"a": 1, "b": [2, 1]})


@pytest.mark.django_db(transaction=True)
def test_of_two_at_once_one_works_and_the_other_is_told_to_wait() -> None:
    user = User.objects.create_user("ada@example.org")
    ensure_organisation(user)
    owner = Actor.of_membership(user.memberships.get())
    inside, finish = threading.Event(), threading.Event()
    answers: list[Response] = []

    def slow() -> Response:
        inside.set()
        assert finish.wait(30)
        return Response({"ok": True})

    def first() -> None:
        try:
            answers.append(idempotent(request_of(owner, "k"), "jobs", {}, slow))
        finally:
            connection.close()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(Conflict) as caught:
            idempotent(request_of(owner, "k"), "jobs", {}, Counter())
        assert caught.value.code == "idempotency_key_in_use"
    finally:
        finish.set()
        thread.join(30)
    assert [answer.data for answer in answers] == [{"ok": True}]
