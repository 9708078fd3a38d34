"""What an agent hears of a call that is not right, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from marketplace.core.errors import Conflict, ProtocolTooOld, Unauthorised
from marketplace.fleet.wire import agent_view, bearer, decode, demand_protocol
from worker_agent.protocol import Ack, ErrorReply, SyncRequest

FACTS = {"hostname": "h", "agent_version": "1", "python_version": "3", "platform": "p"}
GOOD: dict[str, Any] = {"protocol": 1, "epoch": 1, "boot_id": "b", "beat": 1, "agent_time_ms": 5}


def call(
    body: bytes | None = None, *, method: str = "POST", limit_bytes: int = 4096, **raises: Exception
) -> HttpResponse:
    @agent_view(SyncRequest, limit_bytes=limit_bytes)
    def view(request: HttpRequest, message: SyncRequest) -> Ack:
        for error in raises.values():
            raise error
        return Ack(ok=message.beat == 1)

    content = msgspec.json.encode(GOOD) if body is None else body
    request = RequestFactory().generic(method, "/api/agent/v1/sync", content, content_type="application/json")
    return view(request)


def said(response: HttpResponse) -> ErrorReply:
    assert response["Content-Type"] == "application/json"
    return msgspec.json.decode(response.content, type=ErrorReply)


def test_a_good_call_is_answered_with_the_replys_own_type() -> None:
    response = call()
    assert (response.status_code, response.content) == (200, b"{}")  # Ack() with its default omitted
    assert response["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"beat": "one"}, "beat"),
        ({"usage": [{"seq": 1}]}, "usage.0.assignment_id"),
        ({"facts": {**FACTS, "gpus": [{"index": "x"}]}}, "facts.gpus.0.index"),
        ({"processes": [{"assignment_id": "a", "generation": 1, "state": "asleep"}]}, "processes.0.state"),
    ],
)
def test_a_wrong_value_is_422_and_names_its_field(change: dict[str, Any], field: str) -> None:
    response = call(msgspec.json.encode(GOOD | change))
    assert response.status_code == 422
    assert [each.field for each in said(response).fields] == [field]


def test_a_missing_field_is_named() -> None:
    response = call(msgspec.json.encode({k: v for k, v in GOOD.items() if k != "epoch"}))
    assert [(each.field, each.message) for each in said(response).fields] == [("epoch", "this field is required")]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"protocol": 1', b"\xff\xfe"])
def test_what_is_no_json_is_400(body: bytes) -> None:
    response = call(body)
    assert (response.status_code, said(response).code) == (400, "malformed")


def test_a_body_over_the_limit_is_413_and_only_post_is_answered() -> None:
    assert said(call(limit_bytes=10)).code == "too_large"
    other = call(method="PUT")
    assert (other.status_code, other["Allow"], said(other).code) == (405, "POST", "method_not_allowed")


def test_a_problem_keeps_its_status_code_and_words() -> None:
    response = call(error=Conflict("enrolled anew", code="stale_epoch", retry_after_s=3))
    assert (response.status_code, said(response).code, response["Retry-After"]) == (409, "stale_epoch", "3")


def test_a_database_that_is_away_is_503_and_worth_a_retry() -> None:
    response = call(error=OperationalError("lock timeout"))
    assert (response.status_code, said(response).code, response["Retry-After"]) == (503, "busy", "1")


def test_what_nobody_foresaw_is_a_500_in_json_that_says_nothing_of_the_inside() -> None:
    response = call(error=KeyError("secret detail"))
    assert (response.status_code, said(response).code) == (500, "internal")
    assert b"secret detail" not in response.content


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer  "])
def test_a_call_without_a_credential_is_refused(header: str) -> None:
    with pytest.raises(Unauthorised):
        bearer(RequestFactory().post("/", headers={"Authorization": header}))


def test_the_credential_is_what_follows_bearer() -> None:
    assert bearer(RequestFactory().post("/", headers={"Authorization": "bearer s3cret"})) == "s3cret"


def test_an_agent_that_is_too_old_is_told_to_update() -> None:
    demand_protocol(1)
    demand_protocol(2)
    with pytest.raises(ProtocolTooOld, match="update"):
        demand_protocol(0)


def test_unknown_fields_are_ignored() -> None:
    assert decode(msgspec.json.encode(GOOD | {"news": 1}), SyncRequest).beat == 1
