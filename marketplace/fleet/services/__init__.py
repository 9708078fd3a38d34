"""What changes the fleet: its one door for the layers above and for the views."""

from __future__ import annotations

from marketplace.fleet.services.capacity import (
    change_island,
    register_island,
    register_island_at,
    register_site,
    retire_island,
)
from marketplace.fleet.services.conversation import authenticate, sync
from marketplace.fleet.services.enrolment import (
    IssuedToken,
    enrol,
    issue_join_token,
    revoke_agent,
    revoke_join_tokens,
    rotate_agent,
)
from marketplace.fleet.services.states import sweep_liveness

__all__ = [
    "IssuedToken",
    "authenticate",
    "change_island",
    "enrol",
    "issue_join_token",
    "register_island",
    "register_island_at",
    "register_site",
    "retire_island",
    "revoke_agent",
    "revoke_join_tokens",
    "rotate_agent",
    "sweep_liveness",
    "sync",
]
