"""The sync: one call in which an agent says what is and hears what should be.

Invariant: everything said is a level or a rising counter, so a call that is lost, repeated or late changes nothing
that the next does not put right. All of it is one transaction under the agent's row lock: what is acknowledged is
durable. Locks are taken in the order agent, island, then whatever the layers above take.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from marketplace.accounts.audit import record
from marketplace.core.clock import to_ms
from marketplace.core.errors import Conflict, FieldProblem, InvalidInput, Unauthorised
from marketplace.core.ids import LENGTH, hash_secret, new_secret
from marketplace.fleet import hooks
from marketplace.fleet.liveness import suspect_after_ms
from marketplace.fleet.models import Agent, IslandState, UsageReport
from marketplace.fleet.services.enrolment import (
    CREDENTIAL_PREFIX,
    VERSION_LENGTH,
    facts_problem,
    plain_facts,
    plain_text,
)
from marketplace.fleet.services.states import move, note
from worker_agent.protocol import SyncReply, SyncRequest, UsageRecord

CREDENTIAL_LIFE = timedelta(days=30)
RECORDS_MAX = 1_000
BOOT_ID_LENGTH = 80
COUNTER_MAX = 2**53 - 1  # what JSON numbers hold exactly on every side


def authenticate(credential: str) -> Agent:
    """The agent of this credential, with its row locked until the transaction ends."""
    digest = hash_secret(credential)
    agent = (
        Agent.objects.select_related("island", "island__gpu")
        .select_for_update(of=("self",), no_key=True)
        .filter(Q(credential_hash=digest) | Q(next_credential_hash=digest))
        .first()
    )
    if agent is None:
        raise Unauthorised("this credential is not known")
    if agent.revoked_at is not None:
        raise Unauthorised(f"this agent was revoked: {agent.revoked_why}", code="revoked")
    return agent


def sync(credential: str, request: SyncRequest, now: datetime) -> SyncReply:
    """Answer one call.

    1. The credential names the agent and locks it; another epoch than the island's is a stale holder and is told so,
       before anything is believed. (`archipelago-agent doctor` asks with epoch 0, and so proves its credential.)
    2. A beat newer than the last is taken: when, which boot, what machine, whether it drains; and with it the state of
       the island. An old or repeated one leaves all that alone.
    3. The layers above hear the beat, the usage (stored first, each sequence once) and the processes.
    4. The answer: what should run now, and how far usage is durable.
    """
    _demand_sound(request)
    with transaction.atomic():
        agent = authenticate(credential)
        island = agent.island
        if request.epoch != agent.epoch or agent.epoch != island.epoch:
            raise Conflict("the island was enrolled anew: another agent speaks for it", code="stale_epoch")
        fresh = request.boot_id != agent.boot_id or request.beat > agent.beat
        changed = _see_credential(agent, credential, now)
        if fresh:
            changed |= _take_beat(agent, request, now)
        offered = _offer_credential(agent, now, seen_next="credential_hash" in changed)
        if offered is not None:
            changed.add("next_credential_hash")
        if request.usage:
            agent.usage_acked_seq = max(agent.usage_acked_seq, _store_usage(agent, request.usage, now))
            changed.add("usage_acked_seq")
        if changed:
            agent.save(update_fields=sorted(changed))
        if fresh:
            _settle_state(agent, now)
            hooks.observe_beat(agent, now)
        if request.usage:
            hooks.take_usage(agent, request.usage, now)
        if fresh:
            hooks.take_processes(agent, request.processes, now)
        assignments = hooks.assignments_for(island, now)
    return SyncReply(
        server_time_ms=to_ms(now),
        next_sync_ms=settings.FLEET_SYNC_MS,
        usage_acked_seq=agent.usage_acked_seq,
        assignments=assignments,
        island_state=island.state,
        credential=offered,
        want_facts=bool(agent.misfit) or not agent.facts,
        message=f"this island takes no new work: {agent.misfit}" if agent.misfit else "",
    )


def _take_beat(agent: Agent, request: SyncRequest, now: datetime) -> set[str]:
    changed = {"last_seen_at", "boot_id", "beat"}
    unbroken = timedelta(milliseconds=suspect_after_ms(settings.FLEET_SYNC_MS))
    if agent.last_seen_at is None or now - agent.last_seen_at >= unbroken:
        agent.heard_since = now
        changed.add("heard_since")
    agent.last_seen_at, agent.boot_id, agent.beat = now, request.boot_id, request.beat
    if agent.draining != request.draining:
        agent.draining = request.draining
        changed.add("draining")
    if request.facts is not None:
        agent.facts = plain_facts(request.facts)
        agent.version = plain_text(request.facts.agent_version, VERSION_LENGTH)
        changed |= {"facts", "version"}
        problem = facts_problem(request.facts, agent.island)[:300]
        if problem != agent.misfit:
            agent.misfit = problem
            changed.add("misfit")
            note(agent.island, "facts", problem or "the agent sees the GPUs that were registered", now=now)
    return changed


def _settle_state(agent: Agent, now: datetime) -> None:
    """An island that is heard from is online, unless its agent drains or has lost what was registered."""
    if agent.draining:
        target, words = IslandState.DRAINING, "its agent drains"
    elif agent.misfit:
        target, words = IslandState.DRAINING, agent.misfit
    else:
        target, words = IslandState.ONLINE, "its agent is heard"
    if agent.island.state == target or move(agent.island, target, words, now=now):
        return
    # Swept a moment ago, in a transaction that saw no beat yet: look again, and move from there.
    agent.island.refresh_from_db(fields=["state", "state_since"])
    if agent.island.state != target:
        move(agent.island, target, words, now=now)


def _see_credential(agent: Agent, credential: str, now: datetime) -> set[str]:
    """The first call with a rotated credential ends the one before."""
    digest = hash_secret(credential)
    if digest == agent.credential_hash:
        return set()
    agent.credential_hash, agent.next_credential_hash, agent.credential_issued_at = digest, "", now
    record(agent.island.organisation, f"agent:{agent.id}", "agent.rotated", agent.id, island=agent.island_id)
    note(agent.island, "rotated", "the agent uses its new credential; the old one is void", now=now)
    return {"credential_hash", "next_credential_hash", "credential_issued_at"}


def _offer_credential(agent: Agent, now: datetime, *, seen_next: bool) -> str | None:
    """A new secret with every answer, until one is seen: only hashes are kept, so the last cannot be said again."""
    due = bool(agent.next_credential_hash) or now - agent.credential_issued_at >= CREDENTIAL_LIFE
    if seen_next or not due:
        return None
    secret = new_secret(CREDENTIAL_PREFIX)
    agent.next_credential_hash = hash_secret(secret)
    return secret


def _store_usage(agent: Agent, records: Sequence[UsageRecord], now: datetime) -> int:
    """All records, each sequence once; the highest of them is what may be dropped from the spool. Gaps are normal: a
    counter contains the ones before it, and the agent sends only the newest of an assignment."""
    UsageReport.objects.bulk_create(
        [
            UsageReport(
                agent=agent,
                seq=report.seq,
                assignment_id=report.assignment_id,
                gpu_ms_total=report.gpu_ms_total,
                observed_at_ms=report.observed_at_ms,
                received_at=now,
            )
            for report in records
        ],
        ignore_conflicts=True,
    )
    return max(report.seq for report in records)


def _demand_sound(request: SyncRequest) -> None:
    """What the types do not say: lengths, signs, and characters the database has no place for."""
    problems = []
    if len(request.boot_id) > BOOT_ID_LENGTH or not request.boot_id.isprintable():
        problems.append(FieldProblem("boot_id", f"at most {BOOT_ID_LENGTH} printable characters"))
    if not 0 <= request.beat <= COUNTER_MAX:
        problems.append(FieldProblem("beat", "must be between zero and 2**53"))
    if len(request.usage) > RECORDS_MAX:
        problems.append(FieldProblem("usage", f"at most {RECORDS_MAX} records at once"))
    for index, usage in enumerate(request.usage[:RECORDS_MAX]):
        if len(usage.assignment_id) > LENGTH or not usage.assignment_id.isprintable():
            problems.append(FieldProblem(f"usage.{index}.assignment_id", f"at most {LENGTH} printable characters"))
        for name in ("seq", "gpu_ms_total", "observed_at_ms"):
            if not 0 <= getattr(usage, name) <= COUNTER_MAX:
                problems.append(FieldProblem(f"usage.{index}.{name}", "must be between zero and 2**53"))
    if problems:
        raise InvalidInput("some fields are not right", fields=problems)
