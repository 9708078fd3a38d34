"""How an assignment becomes processes: one file a launcher, the same four functions in each.

    start(order)            make the processes; returns a Handle that has been written down before it is returned
    poll(handle)            Running, or Exited with the code where it is known
    stop(handle, force)     SIGTERM (or SIGKILL) to all processes of the handle
    adopt(home)             the handles of processes a previous agent left alive

Invariant: a handle names one process for ever. A pid alone does not, so it carries the start time and the kernel's boot
id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from worker_agent.protocol import Assignment


class Handle(msgspec.Struct, kw_only=True, frozen=True):
    assignment_id: str
    generation: int
    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat
    kernel_boot_id: str
    started_monotonic_ms: int
    started_at_ms: int
    workdir: str
    gpu_indices: list[int] = []


@dataclass(frozen=True)
class LaunchOrder:
    """Everything a launcher needs, and nothing it must ask for."""

    assignment: Assignment
    coordinator_url: str
    workdir: Path
    device: str  # auto | cpu | cuda
    gpu_indices: list[int]


@dataclass(frozen=True)
class Running:
    pass


@dataclass(frozen=True)
class Exited:
    """`exit_code` is negative for a signal, as in subprocess; None where nobody was there to learn it."""

    exit_code: int | None


Outcome = Running | Exited


class Launcher(Protocol):
    def start(self, order: LaunchOrder) -> Handle: ...

    def poll(self, handle: Handle) -> Outcome: ...

    def stop(self, handle: Handle, *, force: bool) -> None: ...

    def adopt(self, work_path: Path) -> Sequence[Handle]: ...
