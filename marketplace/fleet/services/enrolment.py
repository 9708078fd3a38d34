"""How an agent comes to speak for an island, and how that ends.

Invariant: a join token works once, whoever races for it, and only for an agent whose GPUs are those registered; every
enrolment raises the island's epoch, which fences off the agent before. Secrets leave once, in a return value.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.core.clock import to_ms
from marketplace.core.errors import Conflict, InvalidInput, Unauthorised
from marketplace.core.ids import hash_secret, new_secret
from marketplace.core.wake import wake
from marketplace.fleet.models import Agent, Island, IslandState, JoinToken
from marketplace.fleet.readings import Registered, misfit
from marketplace.fleet.selectors import current_agent, island_for, live_tokens
from marketplace.fleet.services.states import TICK, move, note
from worker_agent.protocol import EnrolReply, EnrolRequest, HostFacts

JOIN_TOKEN_PREFIX = "arj"  # noqa: S105 - the mark by which a scanner knows such a secret
CREDENTIAL_PREFIX = "arw"
HINT_LENGTH = 12
TOKEN_LIFE = timedelta(hours=1)
# More than this at once is a leak or a loop.
LIVE_TOKENS_MAX = 10
FACTS_MAX_BYTES = 64 * 1024
VERSION_LENGTH = 40


@dataclass(frozen=True)
class IssuedToken:
    """A join token with its secret, which exists nowhere else from here on."""

    token: JoinToken
    secret: str


def issue_join_token(actor: Actor, island_id: str, now: datetime) -> IssuedToken:
    """Lets one agent enrol within the hour. A retry makes a second token; the unused one ends by itself."""
    demand(actor, Action.SELL)
    island_for(actor.organisation, island_id)
    secret = new_secret(JOIN_TOKEN_PREFIX)
    with transaction.atomic():
        # The lock makes the count below hold until the token is in.
        island = Island.objects.select_for_update(no_key=True).get(pk=island_id)
        if island.state == IslandState.RETIRED:
            raise Conflict("a retired island takes no agent", code="retired")
        live = live_tokens(island, now).count()
        if live >= LIVE_TOKENS_MAX:
            raise Conflict(f"this island has {live} unused join tokens: use or revoke one", code="too_many_tokens")
        token = JoinToken.objects.create(
            island=island,
            token_hash=hash_secret(secret),
            hint=secret[:HINT_LENGTH],
            created_by=actor.name,
            created_at=now,
            expires_at=now + TOKEN_LIFE,
        )
        record(actor.organisation, actor.name, "join_token.issued", token.id, island=island.id, hint=token.hint)
        note(island, "token_issued", f"join token {token.hint}… made, good for an hour", now=now)
    return IssuedToken(token, secret)


def revoke_join_tokens(actor: Actor, island_id: str, now: datetime) -> int:
    """End every unused join token of the island; returns how many there were."""
    demand(actor, Action.SELL)
    island = island_for(actor.organisation, island_id)
    with transaction.atomic():
        ended = live_tokens(island, now).update(revoked_at=now)
        if ended:
            record(actor.organisation, actor.name, "join_token.revoked", island.id, tokens=ended)
            note(island, "token_revoked", f"{ended} unused join token{'s' if ended > 1 else ''} revoked", now=now)
    return ended


def enrol(request: EnrolRequest, now: datetime) -> EnrolReply:
    """Exchange a join token for a credential.

    1. The token is found by its hash, and its island locked: enrolments of one island wait for each other.
    2. The token is used by compare-and-swap: of many who bring it, one goes on.
    3. The facts must fit the island; else nothing happened, and the token is still good.
    4. The epoch rises, which makes every agent before this one stale; a new agent row gets the epoch's credential.
    """
    secret = new_secret(CREDENTIAL_PREFIX)
    with transaction.atomic():
        token = JoinToken.objects.filter(token_hash=hash_secret(request.join_token)).first()
        if token is None:
            raise Unauthorised("this join token is not known")
        island = (
            Island.objects.select_related("gpu", "organisation")
            .select_for_update(of=("self",), no_key=True)
            .get(pk=token.island_id)
        )
        usable = live_tokens(island, now).filter(pk=token.pk)
        if not usable.update(used_at=now):
            token.refresh_from_db()
            raise _refusal_of(token)
        problem = facts_problem(request.facts, island)
        if problem:
            raise InvalidInput.at("facts.gpus", problem, code="facts_do_not_fit")
        island.epoch += 1
        Island.objects.filter(pk=island.pk).update(epoch=island.epoch)
        agent = Agent.objects.create(
            island=island,
            epoch=island.epoch,
            credential_hash=hash_secret(secret),
            credential_issued_at=now,
            enrolled_at=now,
            facts=plain_facts(request.facts),
            version=plain_text(request.facts.agent_version, VERSION_LENGTH),
        )
        name = f"agent:{agent.id}"
        record(island.organisation, name, "agent.enrolled", agent.id, island=island.id, epoch=agent.epoch)
        host = plain_text(request.facts.hostname, 80)
        note(island, "enrolled", f"agent on {host} enrolled, epoch {agent.epoch}", now=now, agent=agent.id)
        wake(TICK)
    return EnrolReply(
        agent_id=agent.id,
        island_id=island.id,
        island_name=island.name,
        epoch=agent.epoch,
        credential=secret,
        server_time_ms=to_ms(now),
    )


def rotate_agent(actor: Actor, island_id: str, now: datetime) -> Agent:
    """Have the agent take a new credential with its next call. The old one works until the new one is seen."""
    demand(actor, Action.SELL)
    agent = _demand_agent(actor, island_id)
    with transaction.atomic():
        begin_rotation(agent)
        record(actor.organisation, actor.name, "agent.rotation_asked", agent.id, island=island_id)
        note(agent.island, "rotation", "a new credential goes to the agent with its next call", now=now)
    return agent


def begin_rotation(agent: Agent) -> None:
    """Mark the rotation as wanted: a secret nobody has stands in until the next call is answered with a real one."""
    if not agent.next_credential_hash:
        agent.next_credential_hash = hash_secret(new_secret(CREDENTIAL_PREFIX))
        Agent.objects.filter(pk=agent.pk, next_credential_hash="").update(
            next_credential_hash=agent.next_credential_hash
        )


def revoke_agent(actor: Actor, island_id: str, now: datetime, why: str = "") -> Agent:
    """The agent's next call is refused, and it stops all work. The island waits for another agent."""
    demand(actor, Action.SELL)
    agent = _demand_agent(actor, island_id)
    reason = plain_text(why, 200).strip() or "revoked by its owner"
    with transaction.atomic():
        # The agent's row before the island's, as in a sync.
        Agent.objects.select_for_update(no_key=True).get(pk=agent.pk)
        if not Agent.objects.filter(pk=agent.pk, revoked_at__isnull=True).update(revoked_at=now, revoked_why=reason):
            return agent
        agent.revoked_at, agent.revoked_why = now, reason
        record(actor.organisation, actor.name, "agent.revoked", agent.id, island=island_id, why=reason)
        island = Island.objects.select_for_update(no_key=True).get(pk=island_id)
        if island.state == IslandState.REGISTERED or not move(
            island, IslandState.REGISTERED, f"agent revoked: {reason}", now=now, kind="revoked"
        ):
            note(island, "revoked", f"agent revoked: {reason}", now=now)
    return agent


def facts_problem(facts: HostFacts, island: Island) -> str:
    """Why these facts do not fit the island as it was registered; "" when they do."""
    gpu = island.gpu
    return misfit(
        facts,
        Registered(
            gpu_name=gpu.name,
            family=gpu.family,
            form_factor=gpu.form_factor,
            vram_gib=gpu.vram_gib,
            gpu_count=island.gpu_count,
            simulated=island.simulated,
        ),
    )


def plain_facts(facts: HostFacts) -> dict[str, object]:
    """As stored. PostgreSQL's JSON has no place for NUL, and a page none for a megabyte."""
    if len(msgspec.json.encode(facts)) > FACTS_MAX_BYTES:
        raise InvalidInput.at("facts", f"at most {FACTS_MAX_BYTES:,} bytes")
    plain: dict[str, object] = _without_nul(msgspec.to_builtins(facts))
    return plain


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, list):
        return [_without_nul(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nul(each) for key, each in value.items()}
    return value


def plain_text(text: str, limit: int) -> str:
    """What a stranger wrote, fit for a page and a log: no control characters, no more than `limit` of it."""
    return "".join(character if character.isprintable() else " " for character in text[:limit])


def _refusal_of(token: JoinToken) -> Unauthorised:
    """Of a token that is not live any more."""
    if token.used_at is not None:
        return Unauthorised("this join token was used", code="token_used")
    if token.revoked_at is not None:
        return Unauthorised("this join token was revoked")
    return Unauthorised("this join token has expired", code="token_expired")


def _demand_agent(actor: Actor, island_id: str) -> Agent:
    island = island_for(actor.organisation, island_id)
    agent = current_agent(island)
    if agent is None:
        raise Conflict("no agent speaks for this island", code="no_agent")
    return agent
