"""How long an agent may be silent before its island is suspect, and then lost.

Pure. Invariant: both limits derive from the one interval agents are told (settings.FLEET_SYNC_MS), so a deployment
that asks its agents less often also waits longer for them.
"""

from __future__ import annotations

from marketplace.fleet.models import IslandState

SUSPECT_AFTER_BEATS = 3
LOST_AFTER_BEATS = 9
# While nobody at all is heard it is more likely we who hear nothing, and there is no island to move work to.
LOST_AFTER_BEATS_OF_ALL = 36
# Where silence means something.
WATCHED = (IslandState.ONLINE, IslandState.SUSPECT, IslandState.DRAINING)


def suspect_after_ms(sync_ms: int) -> int:
    return SUSPECT_AFTER_BEATS * sync_ms


def lost_after_ms(sync_ms: int, *, all_silent: bool = False) -> int:
    return (LOST_AFTER_BEATS_OF_ALL if all_silent else LOST_AFTER_BEATS) * sync_ms


def judge(state: str, silent_ms: int, sync_ms: int, *, all_silent: bool = False) -> IslandState | None:
    """The state an island in `state` falls to after `silent_ms` without a beat; None: it stays.

    An agent that drains is expected to fall silent, alone or with all others: it is never suspect, only lost in the
    end."""
    excused = all_silent and state != IslandState.DRAINING
    if state in WATCHED and silent_ms >= lost_after_ms(sync_ms, all_silent=excused):
        # The way to lost leads over suspect, one step a sweep, so that no move skips its event.
        return IslandState.SUSPECT if state == IslandState.ONLINE else IslandState.LOST
    if state == IslandState.ONLINE and silent_ms >= suspect_after_ms(sync_ms):
        return IslandState.SUSPECT
    return None
