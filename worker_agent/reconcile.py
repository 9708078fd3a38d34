"""What should run against what runs: a pure function from both to the actions that close the gap.

Invariants: what is not listed, or past its stop deadline, gets no process; one assignment has at most one process; the
same inputs give the same actions, so it may be called at any moment and any number of times (level-triggered).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from worker_agent.protocol import EXIT_DONE, EXIT_GONE, EXIT_STALE, Assignment

FINAL = (EXIT_DONE, EXIT_STALE, EXIT_GONE)  # codes of the trainer after which the same generation is not started again

GENTLE_GRACE_MS = 60_000  # a drain: the member finishes its step, submits and leaves
STOP_GRACE_MS = 10_000  # the assignment is over: what is not out by then is lost anyway
BACKOFF_FIRST_MS = 2_000
BACKOFF_CAP_MS = 300_000
HEALTHY_MS = 60_000  # a process that lived this long was no crash loop


@dataclass(frozen=True)
class Actual:
    """One assignment's process as the agent sees it. `exit_code` None after an exit: nobody could tell."""

    generation: int
    alive: bool
    exit_code: int | None = None
    failures: int = 0
    exited_at_ms: int = 0  # monotonic
    stopping_since_ms: int | None = None  # monotonic
    stop_grace_ms: int = STOP_GRACE_MS


@dataclass(frozen=True)
class Start:
    assignment: Assignment


@dataclass(frozen=True)
class Stop:
    """SIGTERM now; Kill follows once the grace is over."""

    assignment_id: str
    reason: Literal["drain", "unlisted", "deadline", "generation"]
    grace_ms: int


@dataclass(frozen=True)
class Kill:
    assignment_id: str


@dataclass(frozen=True)
class Forget:
    """The process is gone and nobody wants it: its record may be dropped."""

    assignment_id: str


Action = Start | Stop | Kill | Forget


def reconcile(
    desired: Sequence[Assignment],
    actual: Mapping[str, Actual],
    *,
    server_ms: int | None,
    monotonic: int,
    may_start: bool,
    draining: bool,
) -> list[Action]:
    """`server_ms` None: no idea of the server's time yet; then nothing is started, and deadlines wait for a sync.
    `may_start` False: the list is a memory from before a restart, good for keeping and stopping but not for
    starting."""
    wanted = {assignment.id: assignment for assignment in desired}
    actions: list[Action] = []
    for assignment_id, seen in actual.items():
        if seen.alive:
            action = _stop_or_keep(assignment_id, seen, wanted.get(assignment_id), server_ms, monotonic, draining)
            if action is not None:
                actions.append(action)
        elif assignment_id not in wanted:
            actions.append(Forget(assignment_id))
    if server_ms is None or not may_start or draining:
        return actions
    for assignment in wanted.values():
        if _should_start(assignment, actual.get(assignment.id), server_ms, monotonic):
            actions.append(Start(assignment))
    return actions


def backoff_ms(failures: int) -> int:
    return 0 if failures == 0 else min(BACKOFF_CAP_MS, BACKOFF_FIRST_MS * 2 ** min(failures - 1, 16))


def is_final(exit_code: int | None) -> bool:
    """Exits after which this generation has nothing left to do."""
    return exit_code in FINAL


def _stop_or_keep(
    assignment_id: str, seen: Actual, wanted: Assignment | None, server_ms: int | None, monotonic: int, draining: bool
) -> Stop | Kill | None:
    stop = _reason_to_stop(assignment_id, seen, wanted, server_ms, draining)
    if seen.stopping_since_ms is not None:
        grace = seen.stop_grace_ms if stop is None else min(seen.stop_grace_ms, stop.grace_ms)
        return Kill(assignment_id) if monotonic - seen.stopping_since_ms >= grace else None
    return stop


def _reason_to_stop(
    assignment_id: str, seen: Actual, wanted: Assignment | None, server_ms: int | None, draining: bool
) -> Stop | None:
    if wanted is None or wanted.kind != "train" or wanted.train is None:
        return Stop(assignment_id, "unlisted", STOP_GRACE_MS)
    if server_ms is not None and server_ms >= wanted.stop_at_ms:
        return Stop(assignment_id, "deadline", STOP_GRACE_MS)
    if wanted.generation != seen.generation:
        return Stop(assignment_id, "generation", STOP_GRACE_MS)
    if draining or wanted.drain:
        return Stop(assignment_id, "drain", GENTLE_GRACE_MS)
    return None


def _should_start(assignment: Assignment, seen: Actual | None, server_ms: int, monotonic: int) -> bool:
    if assignment.kind != "train" or assignment.train is None or assignment.drain:
        return False
    if not assignment.start_at_ms <= server_ms < assignment.stop_at_ms:
        return False
    if seen is None:
        return True
    if seen.alive:
        return False
    if seen.generation != assignment.generation:
        return True
    return not is_final(seen.exit_code) and monotonic - seen.exited_at_ms >= backoff_ms(seen.failures)
