"""The processes of an agent's assignments: adopted, started, stopped, and what is reported of them.

Invariant: an assignment has one process at a time; what is said of it is what is so now, and why its last one ended.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker_agent.clock import monotonic_ms
from worker_agent.errors import LaunchFailed, StateDamaged
from worker_agent.launch import Exited, Handle, Launcher, LaunchOrder
from worker_agent.launch.local import HANDLE_FILE, log_tail, read_status
from worker_agent.protocol import EXIT_ERROR, Assignment, HostFacts, ProcessReport
from worker_agent.reconcile import HEALTHY_MS, Actual, is_final
from worker_agent.state import Home

_REASONS = {
    "drain": "drain",
    "unlisted": "no longer assigned here",
    "deadline": "its time is over",
    "generation": "a newer generation takes its place",
}


@dataclass
class Worker:
    """One assignment's process, past or present."""

    generation: int
    handle: Handle | None = None
    alive: bool = False
    exit_code: int | None = None
    failures: int = 0
    exited_at_ms: int = 0
    stopping_since_ms: int | None = None
    stop_grace_ms: int = 0
    message: str = ""

    def actual(self) -> Actual:
        return Actual(
            generation=self.generation,
            alive=self.alive,
            exit_code=self.exit_code,
            failures=self.failures,
            exited_at_ms=self.exited_at_ms,
            stopping_since_ms=self.stopping_since_ms,
            stop_grace_ms=self.stop_grace_ms,
        )

    def report(self, assignment_id: str) -> ProcessReport:
        state: Literal["starting", "running", "exited", "failed", "unknown"]
        tail: list[str] = []
        if self.alive and self.handle is not None:
            told = read_status(Path(self.handle.workdir)).get("state", "starting")
            state = "starting" if told in ("starting", "catching_up") else "running"
        elif self.stopping_since_ms is not None or is_final(self.exit_code):
            state = "exited"
        elif self.exit_code is None:
            state = "unknown"
        else:
            state = "failed"
        if state in ("failed", "unknown") and self.handle is not None:
            tail = log_tail(Path(self.handle.workdir))
        return ProcessReport(
            assignment_id=assignment_id,
            generation=self.generation,
            state=state,
            pid=self.handle.pid if self.handle is not None else None,
            exit_code=self.exit_code,
            started_at_ms=self.handle.started_at_ms if self.handle is not None else None,
            message=self.message,
            log_tail=tail,
        )


class Workers:
    """All of them, by assignment. `say` gets a line for whatever happens."""

    def __init__(
        self, home: Home, launcher: Launcher, *, server_url: str, device: str, say: Callable[[str], None]
    ) -> None:
        self._home = home
        self._launcher = launcher
        self._server_url = server_url
        self._device = device
        self._say = say
        self._workers: dict[str, Worker] = {}

    def __contains__(self, assignment_id: str) -> bool:
        return assignment_id in self._workers

    def get(self, assignment_id: str) -> Worker | None:
        return self._workers.get(assignment_id)

    @property
    def any_alive(self) -> bool:
        return any(worker.alive for worker in self._workers.values())

    def actual(self) -> dict[str, Actual]:
        return {key: worker.actual() for key, worker in self._workers.items()}

    def reports(self) -> list[ProcessReport]:
        return [worker.report(key) for key, worker in sorted(self._workers.items())]

    def adopt(self) -> Iterator[Handle]:
        """Take over what an agent before this one left; yields those still at work."""
        for handle in self._launcher.adopt(self._home.work_path):
            outcome = self._launcher.poll(handle)
            worker = Worker(generation=handle.generation, handle=handle, alive=not isinstance(outcome, Exited))
            self._workers[handle.assignment_id] = worker
            if isinstance(outcome, Exited):
                worker.exit_code = outcome.exit_code
                worker.exited_at_ms = monotonic_ms()
            else:
                self._say(f"took over {handle.assignment_id}: process {handle.pid} is still at work")
                yield handle

    def poll(self, now: int) -> bool:
        """See which have ended; whether any has."""
        ended = False
        for key, worker in self._workers.items():
            if not worker.alive or worker.handle is None:
                continue
            outcome = self._launcher.poll(worker.handle)
            if isinstance(outcome, Exited):
                self._note_end(key, worker, worker.handle, outcome, now)
                ended = True
        return ended

    def _note_end(self, key: str, worker: Worker, handle: Handle, outcome: Exited, now: int) -> None:
        worker.alive = False
        worker.exit_code = outcome.exit_code
        worker.exited_at_ms = now
        lived = now - handle.started_monotonic_ms
        if worker.stopping_since_ms is not None:
            self._say(f"{key} stopped, {_exit_words(outcome.exit_code)}")
        elif is_final(outcome.exit_code):
            self._say(f"{key} finished, {_exit_words(outcome.exit_code)}")
        else:
            worker.failures = 1 if lived >= HEALTHY_MS else worker.failures + 1
            said = read_status(Path(handle.workdir)).get("message", "")
            worker.message = f"{_exit_words(outcome.exit_code)}{': ' + printable(str(said)) if said else ''}"
            self._say(f"{key} failed after {lived / 1000:.1f} s ({worker.failures} in a row), {worker.message}")

    def start(self, assignment: Assignment, facts: HostFacts, now: int) -> None:
        before = self._workers.get(assignment.id)
        failures = before.failures if before is not None and before.generation == assignment.generation else 0
        worker = Worker(generation=assignment.generation, failures=failures)
        try:
            indices = self._free_gpus(assignment, facts)
            worker.handle = self._launcher.start(
                LaunchOrder(
                    assignment=assignment,
                    coordinator_url=self._server_url,
                    workdir=self._home.workdir(assignment.id),
                    device=self._device if self._device != "auto" else ("auto" if indices else "cpu"),
                    gpu_indices=indices,
                )
            )
            worker.alive = True
            self._say(f"{assignment.id} started, process {worker.handle.pid}, generation {assignment.generation}")
        except (LaunchFailed, StateDamaged) as error:
            worker.failures += 1
            worker.exited_at_ms = now
            worker.exit_code = EXIT_ERROR
            worker.message = str(error)
            self._say(f"{assignment.id} could not start ({worker.failures} in a row): {error}")
        self._workers[assignment.id] = worker

    def _free_gpus(self, assignment: Assignment, facts: HostFacts) -> list[int]:
        taken = {i for w in self._workers.values() if w.alive and w.handle is not None for i in w.handle.gpu_indices}
        real = [gpu.index for gpu in facts.gpus if not gpu.simulated and gpu.index not in taken]
        return real[: assignment.gpus]

    def stop(self, assignment_id: str, reason: str, grace_ms: int, now: int) -> None:
        worker = self._workers[assignment_id]
        if worker.handle is None:
            return
        worker.stopping_since_ms, worker.stop_grace_ms = now, grace_ms
        self._launcher.stop(worker.handle, force=False)
        self._say(f"{assignment_id} told to stop ({_REASONS[reason]}), {grace_ms // 1000} s to leave")

    def kill(self, assignment_id: str, why: str) -> None:
        worker = self._workers[assignment_id]
        if worker.handle is not None:
            worker.stopping_since_ms = worker.stopping_since_ms or monotonic_ms()
            self._launcher.stop(worker.handle, force=True)
            self._say(f"{assignment_id} killed: {why}")

    def kill_all(self, why: str) -> None:
        for key, worker in self._workers.items():
            if worker.alive:
                self.kill(key, why)

    def forget(self, assignment_id: str) -> None:
        worker = self._workers.pop(assignment_id)
        if worker.handle is not None:
            shutil.rmtree(worker.handle.workdir, ignore_errors=True)

    def disown_stopped(self, drained: set[str]) -> None:
        """Those that ended because the agent ends: the next agent must not take the exit for the work's own end."""
        for key, worker in self._workers.items():
            if worker.handle is not None and worker.stopping_since_ms is not None and key not in drained:
                (Path(worker.handle.workdir) / HANDLE_FILE).unlink(missing_ok=True)


def printable(text: str, limit: int = 300) -> str:
    """What somebody else wrote, safe to show on one line of a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)[:limit]


def _exit_words(code: int | None) -> str:
    if code is None:
        return "exit code not known"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit {code}"
