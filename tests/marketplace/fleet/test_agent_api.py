"""Enrol and sync over HTTP, as an agent calls them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.http import HttpResponse
from django.test import Client

from marketplace.core.clock import database_now
from marketplace.fleet import services
from tests.marketplace.fleet.build import beat, enrol_request, island, seller
from worker_agent.protocol import EnrolReply, ErrorReply, SyncReply

pytestmark = pytest.mark.django_db


def post(path: str, message: Any, credential: str = "") -> HttpResponse:
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    client = Client(enforce_csrf_checks=True)
    return client.post(
        f"/api/agent/v1/{path}", msgspec.json.encode(message), content_type="application/json", headers=headers
    )


def code(response: HttpResponse) -> tuple[int, str]:
    return response.status_code, msgspec.json.decode(response.content, type=ErrorReply).code


@pytest.fixture
def token() -> str:
    actor = seller()
    now = database_now()
    return services.issue_join_token(actor, island(actor, now=now).id, now).secret


def test_an_agent_enrols_and_syncs(token: str) -> None:
    answer = post("enrol", enrol_request(token))
    assert answer.status_code == 200
    reply = msgspec.json.decode(answer.content, type=EnrolReply)
    synced = post("sync", beat(), reply.credential)
    assert synced.status_code == 200
    assert msgspec.json.decode(synced.content, type=SyncReply).island_state == "online"


def test_refusals_have_the_codes_the_agent_knows(token: str) -> None:
    old = enrol_request(token)
    old.protocol = 0
    assert code(post("enrol", old)) == (426, "protocol_too_old")
    assert code(post("enrol", enrol_request("arj_nothing"))) == (401, "unauthorised")
    credential = msgspec.json.decode(post("enrol", enrol_request(token)).content, type=EnrolReply).credential
    assert code(post("enrol", enrol_request(token))) == (401, "token_used")
    assert code(post("sync", beat())) == (401, "unauthorised")
    assert code(post("sync", beat(), "arw_nothing")) == (401, "unauthorised")
    assert code(post("sync", beat(0, epoch=0, boot_id="doctor"), credential)) == (409, "stale_epoch")
    late = beat()
    late.protocol = 0
    assert code(post("sync", late, credential)) == (426, "protocol_too_old")
    assert code(post("sync", {"protocol": 1}, credential)) == (422, "invalid")


def test_an_api_key_or_a_session_is_no_agent(client: Client) -> None:
    assert client.get("/api/agent/v1/sync").status_code == 405
    assert code(post("sync", beat(), "arc_some_api_key")) == (401, "unauthorised")


def test_an_idle_sync_over_http_is_at_most_ten_queries(token: str, django_assert_max_num_queries: Any) -> None:
    credential = msgspec.json.decode(post("enrol", enrol_request(token)).content, type=EnrolReply).credential
    post("sync", beat(1), credential)
    with django_assert_max_num_queries(10) as queries:
        post("sync", beat(2), credential)
    assert len(queries) >= 4
