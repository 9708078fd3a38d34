"""GPU time by assignment: elapsed monotonic milliseconds times GPUs, as one counter that only rises.

Invariants: an instant is counted at most once, also across restarts of the agent; nothing is counted outside the
assignment's window (server time); the counter never exceeds window times GPUs.

Time the agent was not there to see. After a kill the last entry of the spool says what was counted and up to which
instant of the kernel's monotonic clock. If the very process that was being metered (same pid, start time and boot) is
still alive when the agent returns, it was alive all along, and the gap is counted, up to ADOPTION_CAP_MS: a longer
absence is not claimed, since nobody watched the GPUs. If the process has ended, or for a plain reservation (which has
no process to bear witness), the gap is not counted: a doubt goes to the buyer. The control plane takes the minimum with
its own heartbeat coverage anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_agent.spool import Spool

ADOPTION_CAP_MS = 15 * 60_000


@dataclass
class Counter:
    """`counted_until_ms` is monotonic; None while nothing is being metered."""

    gpu_ms_total: int = 0
    counted_until_ms: int | None = None
    recorded_ms_total: int = -1  # what the newest spool entry says; -1: none yet


class Meter:
    def __init__(self, spool: Spool, kernel_boot_id: str) -> None:
        self._spool = spool
        self._boot = kernel_boot_id
        self._counters: dict[str, Counter] = {}
        for assignment_id in spool.assignment_ids():
            entry = spool.latest(assignment_id)
            if entry is not None:
                total = entry.record.gpu_ms_total
                self._counters[assignment_id] = Counter(gpu_ms_total=total, recorded_ms_total=total)

    def total(self, assignment_id: str) -> int:
        counter = self._counters.get(assignment_id)
        return 0 if counter is None else counter.gpu_ms_total

    def adopt(self, assignment_id: str, now_ms: int, started_ms: int) -> None:
        """A process started at `started_ms` is still the same one: take up counting where the spool left off."""
        counter = self._counters.setdefault(assignment_id, Counter())
        entry = self._spool.latest(assignment_id)
        begin = started_ms
        if entry is not None and entry.kernel_boot_id == self._boot:
            begin = max(begin, entry.counted_until_ms)
        counter.counted_until_ms = min(now_ms, max(begin, now_ms - ADOPTION_CAP_MS))

    def count(
        self, assignment_id: str, now_ms: int, *, gpus: int, start_ms: int, stop_ms: int, begin_ms: int | None = None
    ) -> None:
        """The assignment is being served now. All arguments in monotonic milliseconds; `start_ms` and `stop_ms` are the
        window. `begin_ms` is when the service began, if it began since the last call."""
        counter = self._counters.setdefault(assignment_id, Counter())
        since = counter.counted_until_ms
        if since is None:
            # A service that began after this tick was read counts from its own beginning, not from the tick.
            since = now_ms if begin_ms is None else begin_ms
        counted = max(0, min(now_ms, stop_ms) - max(since, start_ms))
        ceiling = max(0, stop_ms - start_ms) * gpus
        counter.gpu_ms_total = max(counter.gpu_ms_total, min(counter.gpu_ms_total + counted * gpus, ceiling))
        counter.counted_until_ms = max(since, now_ms)

    def pause_others(self, served: set[str]) -> None:
        """Time of everything not in `served` is not counted from here on, until `count` is called for it again."""
        for assignment_id, counter in self._counters.items():
            if assignment_id not in served:
                counter.counted_until_ms = None

    def record(self, now_ms: int, observed_at_ms: int) -> int:
        """Write every counter that rose since its last entry. The number written."""
        written = 0
        for assignment_id, counter in self._counters.items():
            if counter.gpu_ms_total <= max(counter.recorded_ms_total, 0):
                continue
            self._spool.append(
                assignment_id,
                counter.gpu_ms_total,
                observed_at_ms=observed_at_ms,
                counted_until_ms=now_ms if counter.counted_until_ms is None else counter.counted_until_ms,
                kernel_boot_id=self._boot,
            )
            counter.recorded_ms_total = counter.gpu_ms_total
            written += 1
        return written

    def forget(self, assignment_id: str) -> None:
        if self._spool.forget(assignment_id):
            self._counters.pop(assignment_id, None)
