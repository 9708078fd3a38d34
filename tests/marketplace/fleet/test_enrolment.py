"""Join tokens, enrolment, rotation and revocation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection

from marketplace.accounts.models import AuditEvent
from marketplace.core.errors import Conflict, InvalidInput, Problem, Unauthorised
from marketplace.core.ids import hash_secret
from marketplace.fleet import selectors, services
from marketplace.fleet.models import Agent, FleetEvent, Island, IslandState, JoinToken
from marketplace.fleet.services.enrolment import LIVE_TOKENS_MAX, TOKEN_LIFE
from tests.marketplace.fleet.build import NOW, beat, enrol_request, enrolled, facts, island, seller

pytestmark = pytest.mark.django_db


def test_a_token_becomes_the_agents_own_credential_and_only_hashes_are_kept() -> None:
    actor = seller()
    made = island(actor)
    issued = services.issue_join_token(actor, made.id, NOW)
    reply = services.enrol(enrol_request(issued.secret), NOW)
    agent = Agent.objects.get()
    assert (reply.agent_id, reply.island_id, reply.island_name, reply.epoch) == (agent.id, made.id, "north", 1)
    assert agent.credential_hash == hash_secret(reply.credential)
    assert issued.token.token_hash == hash_secret(issued.secret)
    assert agent.facts["hostname"] == "node-1"
    assert agent.version == "0.1.0"
    assert AuditEvent.objects.filter(action="agent.enrolled", actor=f"agent:{agent.id}").count() == 1
    secrets = (issued.secret, reply.credential)
    rows = [*AuditEvent.objects.values_list("detail", flat=True), *FleetEvent.objects.values_list("message", flat=True)]
    assert not any(secret in str(row) for secret in secrets for row in rows)


def test_a_token_works_once() -> None:
    actor = seller()
    issued = services.issue_join_token(actor, island(actor).id, NOW)
    services.enrol(enrol_request(issued.secret), NOW)
    with pytest.raises(Unauthorised) as caught:
        services.enrol(enrol_request(issued.secret), NOW)
    assert caught.value.code == "token_used"
    assert Agent.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_fifty_enrolments_at_once_one_wins() -> None:
    actor = seller()
    made = island(actor)
    secret = services.issue_join_token(actor, made.id, NOW).secret

    def enrol(_: int) -> str:
        try:
            services.enrol(enrol_request(secret), NOW)
        except Problem as problem:
            return problem.code
        else:
            return "enrolled"
        finally:
            connection.close()

    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(enrol, range(50)))
    assert sorted(outcomes) == ["enrolled"] + ["token_used"] * 49
    assert Agent.objects.count() == 1
    made.refresh_from_db()
    assert made.epoch == 1


def test_an_expired_a_revoked_and_an_unknown_token_are_refused() -> None:
    actor = seller()
    made = island(actor)
    late = services.issue_join_token(actor, made.id, NOW)
    with pytest.raises(Unauthorised) as caught:
        services.enrol(enrol_request(late.secret), NOW + TOKEN_LIFE)
    assert caught.value.code == "token_expired"
    assert services.revoke_join_tokens(actor, made.id, NOW) == 1
    for secret in (late.secret, "arj_nonsense"):
        with pytest.raises(Unauthorised) as caught:
            services.enrol(enrol_request(secret), NOW)
        assert caught.value.code == "unauthorised"
    assert Agent.objects.count() == 0


def test_unused_tokens_do_not_pile_up() -> None:
    actor = seller()
    made = island(actor)
    for _ in range(LIVE_TOKENS_MAX):
        services.issue_join_token(actor, made.id, NOW)
    with pytest.raises(Conflict):
        services.issue_join_token(actor, made.id, NOW)
    services.issue_join_token(actor, made.id, NOW + TOKEN_LIFE)


def test_gpus_that_do_not_fit_are_refused_in_words_and_the_token_is_still_good() -> None:
    actor = seller()
    made = island(actor, simulated=False)
    secret = services.issue_join_token(actor, made.id, NOW).secret
    for reported, words in (
        (facts(4), "not registered as simulated"),
        (facts(2, simulated=False), "the agent sees 2 × NVIDIA H100 80GB HBM3"),
        (facts(4, simulated=False, name="NVIDIA L40S"), "4 × NVIDIA L40S"),
    ):
        with pytest.raises(InvalidInput) as caught:
            services.enrol(enrol_request(secret, reported), NOW)
        assert [problem.field for problem in caught.value.fields] == ["facts.gpus"]
        assert words in caught.value.message
    assert JoinToken.objects.get().used_at is None
    assert services.enrol(enrol_request(secret, facts(4, simulated=False)), NOW).epoch == 1


def test_enrolling_anew_fences_off_the_agent_before() -> None:
    actor = seller()
    made = island(actor)
    first = enrolled(actor, made)
    services.sync(first.credential, beat(), NOW)
    second = enrolled(actor, made, now=NOW + timedelta(seconds=1))
    assert second.epoch == 2
    with pytest.raises(Conflict) as caught:
        services.sync(first.credential, beat(2), NOW)
    assert caught.value.code == "stale_epoch"
    assert services.sync(second.credential, beat(epoch=2), NOW).island_state == "online"
    made.refresh_from_db()
    current = selectors.current_agent(made)
    assert current is not None
    assert current.id == second.agent_id


def test_a_stranger_cannot_write_control_characters_into_our_pages() -> None:
    actor = seller()
    made = island(actor)
    reported = facts()
    reported.hostname = "node\x00\x1b[31m" + "x" * 500
    reported.gpu_note = "a\x00b\\u0000"
    enrolled(actor, made, reported=reported)
    event = selectors.events_of(made)[0]
    assert event.message.isprintable()
    assert Agent.objects.get().facts["gpu_note"] == "ab\\u0000"


def test_facts_of_a_megabyte_are_refused() -> None:
    actor = seller()
    issued = services.issue_join_token(actor, island(actor).id, NOW)
    reported = facts()
    reported.gpu_note = "x" * 1_000_000
    with pytest.raises(InvalidInput) as caught:
        services.enrol(enrol_request(issued.secret, reported), NOW)
    assert caught.value.fields[0].field == "facts"


def test_a_revoked_agent_is_out_and_the_island_waits_for_another() -> None:
    actor = seller()
    made = island(actor)
    reply = enrolled(actor, made)
    services.sync(reply.credential, beat(), NOW)
    services.revoke_agent(actor, made.id, NOW, why="laptop stolen")
    with pytest.raises(Unauthorised, match="laptop stolen") as caught:
        services.sync(reply.credential, beat(2), NOW)
    assert caught.value.code == "revoked"
    made.refresh_from_db()
    assert made.state == IslandState.REGISTERED
    assert selectors.current_agent(made) is None
    assert selectors.events_of(made)[0].kind == "revoked"
    with pytest.raises(Conflict) as gone:
        services.revoke_agent(actor, made.id, NOW)
    assert gone.value.code == "no_agent"
    assert services.sync(enrolled(actor, made).credential, beat(epoch=2), NOW).island_state == "online"


def test_a_rotated_credential_is_offered_until_it_is_seen_and_the_old_one_works_until_then() -> None:
    actor = seller()
    made = island(actor)
    old = enrolled(actor, made).credential
    services.rotate_agent(actor, made.id, NOW)
    lost = services.sync(old, beat(1), NOW).credential
    taken = services.sync(old, beat(2), NOW).credential
    assert lost is not None
    assert taken is not None
    assert lost != taken
    with pytest.raises(Unauthorised):
        services.sync(lost, beat(3), NOW)  # of an answer that never arrived: only the last one offered is good
    assert services.sync(taken, beat(3), NOW).credential is None
    with pytest.raises(Unauthorised):
        services.sync(old, beat(4), NOW)
    assert AuditEvent.objects.filter(action="agent.rotated").count() == 1


def test_a_credential_is_rotated_by_itself_after_thirty_days() -> None:
    actor = seller()
    old = enrolled(actor, island(actor)).credential
    assert services.sync(old, beat(1), NOW + timedelta(days=29)).credential is None
    new = services.sync(old, beat(2), NOW + timedelta(days=30)).credential
    assert new is not None
    assert services.sync(new, beat(3), NOW + timedelta(days=31)).credential is None


def test_the_epoch_only_rises() -> None:
    actor = seller()
    made = island(actor)
    epochs = [enrolled(actor, made).epoch for _ in range(3)]
    assert epochs == [1, 2, 3]
    assert Island.objects.get().epoch == 3
