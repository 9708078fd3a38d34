"""Who may do what: an actor has one role in one organisation, and an action names the least role that may do it.

Invariant: a role may do everything a lesser role may, and nobody can hand out more than they have. A person and a key
are judged by the same table, so a key is never a way around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from django.http import HttpRequest
from rest_framework.request import Request

from marketplace.accounts.models import ApiKey, Membership, Organisation, Role
from marketplace.core.errors import Forbidden, Unauthorised


class Action(StrEnum):
    VIEW = "view"  # read what the organisation has
    WORK = "work"  # submit and cancel jobs, rent for them
    SELL = "sell"  # register islands, set prices, enrol agents
    PAY = "pay"  # top up, pay out
    MANAGE = "manage"  # members, keys, the organisation itself


_RANK = {Role.VIEWER: 0, Role.MEMBER: 1, Role.ADMIN: 2, Role.OWNER: 3}
_LEAST = {
    Action.VIEW: Role.VIEWER,
    Action.WORK: Role.MEMBER,
    Action.SELL: Role.MEMBER,
    Action.PAY: Role.ADMIN,
    Action.MANAGE: Role.ADMIN,
}


class HasRole(Protocol):
    @property
    def role(self) -> str: ...


@dataclass(frozen=True)
class Actor:
    """On whose behalf a request acts. `name` is what the audit trail shows: `user:7`, `key:key_01...`."""

    organisation: Organisation
    role: str
    name: str

    @classmethod
    def of_membership(cls, membership: Membership) -> Actor:
        return cls(membership.organisation, membership.role, f"user:{membership.user_id}")

    @classmethod
    def of_key(cls, key: ApiKey) -> Actor:
        return cls(key.organisation, key.role, f"key:{key.id}")


def may(holder: HasRole | None, action: Action) -> bool:
    """Whether a membership, key or actor may do `action`; None (no membership) may do nothing."""
    return holder is not None and _RANK[Role(holder.role)] >= _RANK[_LEAST[action]]


def may_grant(holder: HasRole, role: str) -> bool:
    """Nobody gives away a role above their own."""
    return _RANK[Role(holder.role)] >= _RANK[Role(role)]


def demand(holder: HasRole | None, action: Action) -> None:
    if not may(holder, action):
        raise Forbidden(f"your role in this organisation does not allow this ({action})", code="role_too_low")


def current_actor(request: HttpRequest | Request) -> Actor:
    """The actor of a request, set by the session's middleware or by the key's authentication."""
    actor = getattr(request, "actor", None)
    if isinstance(actor, Actor):
        return actor
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        raise Unauthorised("sign in, or send an API key")
    raise Forbidden("you are a member of no organisation", code="no_organisation")
