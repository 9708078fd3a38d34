"""Keeps child processes running: starts them, notices their end, starts them again with growing patience, ends them.

The keeper is one thread that compares what is wanted with what is, several times a second, and acts on the difference.
It starts every child itself, because the kernel ends a child with the thread that started it (see `spawn`).
Invariant: after `close` nothing started here runs; and if this process dies without it, the kernel does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from marketplace.devstack.spawn import end, spawn, sweep

LOOK_EVERY_S = 0.1
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A child that has been up this long has recovered: its next end is a new story.
SETTLED_AFTER_S = 30.0
# A child that ends this often before it is ready will not get there by itself; whoever waits for it is told.
HOPELESS_AFTER = 4
LOG_KEEP_BYTES = 20_000_000


class Phase(Enum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to start again"


@dataclass(frozen=True)
class Event:
    """One line of the stack's story."""

    at: datetime
    service: str
    what: str
    detail: str = ""

    def line(self) -> str:
        return f"{self.at:%H:%M:%S} {self.service:<9} {self.what}{': ' if self.detail else ''}{self.detail}"


class ServiceFailed(Exception):
    """A child could not be brought up; the message holds its own last words."""


@dataclass(frozen=True)
class Child:
    """How one child is run. `before` clears the way, `ready` says whether it serves (None: it runs, so it serves)."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    cwd: Path
    ready: Callable[[], bool] | None = None
    before: Callable[[], None] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    uid: int | None = None
    gid: int | None = None
    start_limit_s: float = 60.0
    patience_s: float = 10.0


def backoff_s(failures: int) -> float:
    """How long to wait before the next start, after that many ends in a row."""
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** max(0, failures - 1)))


def ending(returncode: int) -> str:
    """The end of a process in words."""
    if returncode >= 0:
        return f"ended with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"


def last_words(log: Path, lines: int = 3) -> str:
    """The last lines a child wrote: its own account of why it ended."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            written = stream.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return " | ".join([line.strip() for line in written if line.strip()][-lines:])[-600:]


@dataclass
class _Kept:
    child: Child
    wanted: bool = False
    once: bool = False
    phase: Phase = Phase.DOWN
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0
    due: float = 0.0
    failures: int = 0
    starts: int = 0
    failure: str | None = None


class Supervisor:
    """A keeper and its children. Every method may be called from any thread."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._kept: dict[str, _Kept] = {}
        self._on_event = on_event or (lambda event: None)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------- asking

    def add(self, child: Child) -> None:
        with self._changed:
            if child.name in self._kept:
                raise ValueError(f"{child.name} is already kept")
            self._kept[child.name] = _Kept(child)

    def start(self, name: str) -> None:
        """Have the child run from now on; returns when it is ready, raises ServiceFailed when it will not be."""
        self.want(name)
        with self._changed:
            kept = self._kept[name]
            self._changed.wait_for(lambda: kept.phase is Phase.READY or kept.failure is not None or self._closing)
            if kept.phase is not Phase.READY:
                raise ServiceFailed(f"{name} does not start: {kept.failure or 'the stack is closing'}")

    def want(self, name: str) -> None:
        """Have the child run, now and from now on; does not wait."""
        with self._changed:
            kept = self._kept[name]
            if not kept.wanted or kept.phase is Phase.WAITING:
                kept.wanted, kept.failures, kept.due, kept.failure = True, 0, 0.0, None
            self._changed.notify_all()

    def run_once(self, child: Child, limit_s: float = 300.0) -> None:
        """Run a child to its end; raises ServiceFailed with its last words when that is not a good one."""
        child = replace(child, ready=lambda: False, start_limit_s=limit_s)
        with self._changed:
            kept = self._kept[child.name] = _Kept(child, wanted=True, once=True)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not kept.wanted or self._closing)
            del self._kept[child.name]
            if kept.failure is not None or self._closing:
                raise ServiceFailed(f"{child.name} failed: {kept.failure or 'the stack is closing'}")

    def stop(self, name: str) -> None:
        """Have the child stop in its own way, and stay down until it is started."""
        with self._changed:
            kept = self._kept[name]
            kept.wanted = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: kept.phase is Phase.DOWN or self._closing)

    def kill(self, name: str, *, revive: bool = True) -> int:
        """Kill the child as a crash would, and give the pid it had. Without `revive` it stays down."""
        with self._changed:
            kept = self._kept[name]
            process = kept.process
            if process is None or process.poll() is not None:
                raise ServiceFailed(f"{name} is not running")
            if not revive:
                kept.wanted = False
            os.kill(process.pid, signal.SIGKILL)
            # Returned only when the keeper has seen the end, so that what follows does not meet the dead child.
            self._changed.wait_for(lambda: kept.process is not process or self._closing)
            return process.pid

    def pid(self, name: str) -> int | None:
        with self._changed:
            process = self._kept[name].process
            return None if process is None or process.poll() is not None else process.pid

    def phase(self, name: str) -> Phase:
        with self._changed:
            return self._kept[name].phase

    def starts(self, name: str) -> int:
        """How many times the child has been started."""
        with self._changed:
            return self._kept[name].starts

    def names(self) -> list[str]:
        with self._changed:
            return list(self._kept)

    def wait_ready(self, name: str, limit_s: float = 60.0) -> None:
        """Wait until the child serves (again)."""
        with self._changed:
            kept = self._kept[name]
            if not self._changed.wait_for(lambda: kept.phase is Phase.READY or self._closing, limit_s):
                raise ServiceFailed(f"{name} is not ready after {limit_s:g} s: {kept.failure or kept.phase.value}")

    def close(self) -> None:
        """End every child, the last started first, and the keeper with them. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------------------------------------------ keeping

    def _keep(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    break
                children = list(self._kept.values())
            for kept in children:
                self._tend(kept)
            with self._changed:
                self._changed.notify_all()
                if not self._closing:
                    self._changed.wait(LOOK_EVERY_S)
        for kept in reversed(list(self._kept.values())):
            self._end(kept)
        with self._changed:
            self._changed.notify_all()

    def _tend(self, kept: _Kept) -> None:
        process, now = kept.process, time.monotonic()
        if process is not None and process.poll() is not None:
            self._ended(kept, process, now)
        elif process is not None and not kept.wanted:
            self._end(kept)
        elif process is not None and kept.phase is Phase.STARTING:
            self._look(kept, process, now)
        elif process is None and kept.wanted and now >= kept.due:
            self._start(kept, now)
        elif process is None and not kept.wanted:
            kept.phase = Phase.DOWN

    def _start(self, kept: _Kept, now: float) -> None:
        child = kept.child
        try:
            if child.before is not None:
                child.before()
            child.log.parent.mkdir(parents=True, exist_ok=True)
            if child.log.exists() and child.log.stat().st_size > LOG_KEEP_BYTES:
                child.log.replace(child.log.with_suffix(".old"))
            with open(child.log, "ab") as log:
                process = spawn(
                    child.command,
                    env=child.env,
                    log=log,
                    cwd=child.cwd,
                    death_signal=child.stop_signal,
                    uid=child.uid,
                    gid=child.gid,
                )
        except Exception as error:  # whatever clearing the way raised: the keeper lives on and says it, with back-off
            if kept.once:
                with self._changed:
                    kept.failure, kept.wanted = str(error), False
                return
            self._failed(kept, now, str(error) or type(error).__name__)
            return
        with self._changed:
            kept.process, kept.since, kept.phase, kept.starts = process, now, Phase.STARTING, kept.starts + 1
        self._look(kept, process, now)

    def _look(self, kept: _Kept, process: subprocess.Popen[bytes], now: float) -> None:
        try:
            ready = kept.child.ready is None or kept.child.ready()
        except Exception as error:  # a probe that breaks says "not ready", with its reason
            kept.failure, ready = f"its probe failed: {error}", False
        if ready and process.poll() is None:
            with self._changed:
                kept.phase, kept.failure = Phase.READY, None
            self._say(kept, "ready" if kept.starts == 1 else "ready again", f"pid {process.pid}")
        elif now - kept.since > kept.child.start_limit_s:
            self._say(kept, "not ready", f"after {kept.child.start_limit_s:g} s; ended")
            end(process, how=kept.child.stop_signal, patience_s=kept.child.patience_s)

    def _ended(self, kept: _Kept, process: subprocess.Popen[bytes], now: float) -> None:
        sweep(process)
        settled = kept.phase is Phase.READY and now - kept.since > SETTLED_AFTER_S
        with self._changed:
            kept.process = None
            if settled:
                kept.failures = 0
        why = ending(process.returncode)
        # A process killed outright had no time for words; its last lines are about something else.
        words = "" if process.returncode == -signal.SIGKILL else last_words(kept.child.log)
        if kept.once:
            with self._changed:
                kept.failure = f"{why}, last words: {words}" if process.returncode else None
                kept.wanted, kept.phase = False, Phase.DOWN
            self._say(kept, why if process.returncode else "done")
            return
        if not kept.wanted:
            kept.phase = Phase.DOWN
            self._say(kept, why, "stays down until it is started")
            return
        self._failed(kept, now, f"{why}{f', last words: {words}' if words else ''}")

    def _failed(self, kept: _Kept, now: float, why: str) -> None:
        with self._changed:
            kept.failures += 1
            pause_s = backoff_s(kept.failures)
            kept.phase, kept.due = Phase.WAITING, now + pause_s
            if kept.failures >= HOPELESS_AFTER:
                kept.failure = why
        self._say(kept, why, f"starts again in {pause_s:g} s")

    def _end(self, kept: _Kept) -> None:
        process = kept.process
        if process is not None:
            end(process, how=kept.child.stop_signal, patience_s=kept.child.patience_s)
            self._say(kept, "stopped")
        with self._changed:
            kept.process, kept.phase = None, Phase.DOWN

    def _say(self, kept: _Kept, what: str, detail: str = "") -> None:
        # A listener that fails (a closed terminal) must not end the keeper, and with it every child.
        with contextlib.suppress(Exception):
            self._on_event(Event(datetime.now(UTC), kept.child.name, what, detail))
