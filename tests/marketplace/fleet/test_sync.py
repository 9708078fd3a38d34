"""One call of an agent: what it changes, what repeating it does not, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest_django import Settings

from marketplace.core.clock import to_ms
from marketplace.core.errors import Conflict, InvalidInput
from marketplace.fleet import hooks, services
from marketplace.fleet.models import Agent, FleetEvent, Island, UsageReport
from tests.marketplace.fleet.build import NOW, beat, enrolled, facts, island, seller
from worker_agent.protocol import Assignment, ProcessReport, UsageRecord

pytestmark = pytest.mark.django_db

Sync = Callable[..., Any]


@pytest.fixture
def credential() -> str:
    actor = seller()
    return enrolled(actor, island(actor)).credential


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the layers above are told, in order."""
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(hooks, "_beats", [lambda agent, now: told.append(("beat", agent.beat))])
    monkeypatch.setattr(hooks, "_usage", [lambda agent, records, now: told.append(("usage", [r.seq for r in records]))])
    monkeypatch.setattr(
        hooks, "_processes", [lambda agent, reports, now: told.append(("processes", [r.state for r in reports]))]
    )
    monkeypatch.setattr(hooks, "_assignments", [lambda held, now: told.append(("assignments", None)) or []])
    return told


def usage(*seqs: int, key: str = "lse_1", total: int = 1_000) -> list[UsageRecord]:
    return [
        UsageRecord(seq=seq, assignment_id=key, gpu_ms_total=total * seq, observed_at_ms=to_ms(NOW)) for seq in seqs
    ]


def events() -> list[str]:
    return list(FleetEvent.objects.order_by("id").values_list("kind", flat=True))


def test_the_first_beat_brings_the_island_online(credential: str, settings: Settings) -> None:
    settings.FLEET_SYNC_MS = 1_234
    reply = services.sync(credential, beat(), NOW)
    assert (reply.island_state, reply.next_sync_ms, reply.server_time_ms) == ("online", 1_234, to_ms(NOW))
    assert (reply.usage_acked_seq, reply.assignments, reply.credential, reply.want_facts) == (0, [], None, False)
    assert events()[-1] == "online"
    assert Agent.objects.get().last_seen_at == NOW


def test_an_idle_sync_is_at_most_eight_queries(credential: str, django_assert_max_num_queries: Any) -> None:
    services.sync(credential, beat(1), NOW)
    with django_assert_max_num_queries(8):
        services.sync(credential, beat(2), NOW + timedelta(seconds=5))


def test_beat_usage_processes_and_assignments_come_in_this_order(credential: str, heard: list[tuple[str, Any]]) -> None:
    report = ProcessReport(assignment_id="lse_1", generation=1, state="running")
    services.sync(credential, beat(usage=usage(1), processes=[report]), NOW)
    assert heard == [("beat", 1), ("usage", [1]), ("processes", ["running"]), ("assignments", None)]


def test_a_repeated_or_older_beat_is_answered_and_changes_nothing_but_usage(
    credential: str, heard: list[tuple[str, Any]]
) -> None:
    services.sync(credential, beat(5), NOW)
    heard.clear()
    later = NOW + timedelta(seconds=30)
    for number in (5, 4):
        reply = services.sync(credential, beat(number, draining=True, usage=usage(9)), later)
        assert (reply.island_state, reply.usage_acked_seq) == ("online", 9)
    assert [kind for kind, _ in heard] == ["usage", "assignments"] * 2
    agent = Agent.objects.get()
    assert (agent.last_seen_at, agent.beat, agent.draining) == (NOW, 5, False)


def test_another_boot_begins_its_beats_anew(credential: str) -> None:
    services.sync(credential, beat(50), NOW)
    services.sync(credential, beat(1, boot_id="boot-2"), NOW + timedelta(seconds=9))
    agent = Agent.objects.get()
    assert (agent.boot_id, agent.beat, agent.last_seen_at) == ("boot-2", 1, NOW + timedelta(seconds=9))


def test_doctor_proves_its_credential_and_is_no_beat(credential: str, heard: list[tuple[str, Any]]) -> None:
    with pytest.raises(Conflict) as caught:
        services.sync(credential, beat(0, epoch=0, boot_id="doctor"), NOW)
    assert caught.value.code == "stale_epoch"
    agent = Agent.objects.get()
    assert (agent.last_seen_at, agent.boot_id) == (None, "")
    assert heard == []


def test_usage_is_stored_once_and_acknowledged_up_to_the_highest_sequence(credential: str) -> None:
    assert services.sync(credential, beat(1, usage=usage(2, 7)), NOW).usage_acked_seq == 7
    assert services.sync(credential, beat(2, usage=usage(2, 7, 12)), NOW).usage_acked_seq == 12
    assert services.sync(credential, beat(3), NOW).usage_acked_seq == 12
    assert list(UsageReport.objects.order_by("seq").values_list("seq", flat=True)) == [2, 7, 12]


def test_a_sequence_said_again_with_another_figure_keeps_the_first(credential: str) -> None:
    services.sync(credential, beat(1, usage=usage(3, total=1)), NOW)
    services.sync(credential, beat(2, usage=usage(3, total=900)), NOW)
    assert UsageReport.objects.get().gpu_ms_total == 3


def test_what_is_not_durable_is_not_acknowledged(credential: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(agent: Agent, records: Any, now: datetime) -> None:
        raise DatabaseError("the meter could not be written")

    monkeypatch.setattr(hooks, "_usage", [fail])
    with pytest.raises(DatabaseError), transaction.atomic():
        services.sync(credential, beat(1, usage=usage(4)), NOW)
    assert UsageReport.objects.count() == 0
    assert Agent.objects.get().usage_acked_seq == 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=8))
def test_whatever_is_replayed_each_sequence_is_counted_once(batches: list[list[int]]) -> None:
    with transaction.atomic():
        actor = seller()
        secret = enrolled(actor, island(actor)).credential
        for number, batch in enumerate(batches, 1):
            reply = services.sync(secret, beat(number, usage=usage(*batch)), NOW)
            assert reply.usage_acked_seq == max(seq for sent in batches[:number] for seq in sent)
        stored = list(UsageReport.objects.order_by("seq").values_list("seq", flat=True))
        assert stored == sorted({seq for batch in batches for seq in batch})
        transaction.set_rollback(True)


def test_an_agent_that_drains_makes_its_island_drain_and_comes_back(credential: str) -> None:
    services.sync(credential, beat(1), NOW)
    assert services.sync(credential, beat(2, draining=True), NOW).island_state == "draining"
    assert services.sync(credential, beat(3, draining=True), NOW).island_state == "draining"
    assert services.sync(credential, beat(1, boot_id="boot-2"), NOW).island_state == "online"
    assert events()[-3:] == ["online", "draining", "online"]


def test_an_island_that_lost_gpus_takes_no_new_work_and_is_told_why(credential: str) -> None:
    services.sync(credential, beat(1, facts=facts(4)), NOW)
    reply = services.sync(credential, beat(2, facts=facts(3)), NOW)
    assert (reply.island_state, reply.want_facts) == ("draining", True)
    assert "the agent sees 3 × Simulated GPU" in reply.message
    assert services.sync(credential, beat(3), NOW).island_state == "draining"
    healed = services.sync(credential, beat(4, facts=facts(4)), NOW)
    assert (healed.island_state, healed.want_facts, healed.message) == ("online", False, "")


def test_posed_gpus_after_an_honest_enrolment_take_no_work() -> None:
    actor = seller()
    made = island(actor, simulated=False)
    secret = enrolled(actor, made, reported=facts(4, simulated=False)).credential
    assert services.sync(secret, beat(1, facts=facts(4)), NOW).island_state == "draining"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"boot_id": "b" * 81}, "boot_id"),
        ({"boot_id": "a\x00"}, "boot_id"),
        ({"usage": usage(1, key="x" * 41)}, "usage.0.assignment_id"),
        ({"usage": usage(1, -2)}, "usage.1.seq"),
        ({"usage": usage(1, total=2**63)}, "usage.0.gpu_ms_total"),
        ({"usage": usage(*range(1001))}, "usage"),
    ],
)
def test_what_the_database_has_no_place_for_is_refused_by_field(
    credential: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        services.sync(credential, beat(**change), NOW)
    assert field in [problem.field for problem in caught.value.fields]


def test_what_upper_layers_assign_is_served_by_id(credential: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def assign(key: str) -> Callable[[Island, datetime], list[Assignment]]:
        made = Assignment(id=key, generation=1, kind="reserve", gpus=1, start_at_ms=0, stop_at_ms=1)
        return lambda held, now: [made]

    monkeypatch.setattr(hooks, "_assignments", [assign("lse_2"), assign("lse_1")])
    reply = services.sync(credential, beat(), NOW)
    assert [each.id for each in reply.assignments] == ["lse_1", "lse_2"]
