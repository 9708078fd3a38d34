"""Trainers as processes on this machine, each the leader of a session of its own.

Invariants: the trainer outlives the agent (its output goes to a file, not to a pipe) and is found again by pid, start
time and boot, or by its command line if the agent died before it could write those down; a signal never goes to a
process that merely got the same pid; the member's token is in a 0600 file, never in an argument or a variable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from worker_agent.clock import kernel_boot_id, monotonic_ms, wall_ms
from worker_agent.errors import LaunchFailed
from worker_agent.launch import Exited, Handle, LaunchOrder, Outcome, Running
from worker_agent.state import write_atomic

CONFIG_PREFIX = "trainer-"  # trainer-<generation of the assignment>.json
HANDLE_FILE = "process.json"
LOG_FILE = "trainer.log"
STATUS_FILE = "status.json"  # written by the trainer
LOG_LIMIT_BYTES = 8 * 1024 * 1024
TAIL_LINES = 20
_TAIL_BYTES = 8192
_LINE_LIMIT = 500


class LocalLauncher:
    """`command` is what is run, followed by `--config FILE`."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = list(command or [sys.executable, "-m", "worker_agent.trainer"])
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, order: LaunchOrder) -> Handle:
        train = order.assignment.train
        if train is None:
            raise LaunchFailed(f"assignment {order.assignment.id} has nothing to train")
        try:
            order.workdir.mkdir(parents=True, exist_ok=True, mode=0o700)
            (order.workdir / STATUS_FILE).unlink(missing_ok=True)  # the last process's word is not this one's
            config: dict[str, Any] = {
                "coordinator_url": order.coordinator_url,
                "member_token": train.member_token,
                "generation": train.generation,
                "workdir": str(order.workdir),
                "device": order.device,
                "nproc": train.nproc,
            }
            for old in order.workdir.glob(f"{CONFIG_PREFIX}*.json"):
                old.unlink(missing_ok=True)
            path = order.workdir / f"{CONFIG_PREFIX}{order.assignment.generation}.json"
            write_atomic(path, msgspec.json.encode(config))
            rotate(order.workdir / LOG_FILE)
            log = os.open(order.workdir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                child = subprocess.Popen(
                    [*self._command, "--config", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=_import_root(),
                    env=_environment(order),
                    start_new_session=True,
                )
            finally:
                os.close(log)
        except OSError as error:
            raise LaunchFailed(f"the trainer could not be started: {error}") from error
        self._children[child.pid] = child
        handle = Handle(
            assignment_id=order.assignment.id,
            generation=order.assignment.generation,
            pid=child.pid,
            start_ticks=start_ticks(child.pid) or 0,
            kernel_boot_id=kernel_boot_id(),
            started_monotonic_ms=monotonic_ms(),
            started_at_ms=wall_ms(),
            workdir=str(order.workdir),
            gpu_indices=order.gpu_indices,
        )
        # A full disk here costs nothing: an agent that finds no handle finds the process by its command line.
        with contextlib.suppress(OSError):
            write_atomic(order.workdir / HANDLE_FILE, msgspec.json.encode(handle))
        return handle

    def poll(self, handle: Handle) -> Outcome:
        rotate(Path(handle.workdir) / LOG_FILE)
        child = self._children.get(handle.pid)
        if child is None:
            return Running() if is_alive(handle) else Exited(_told_exit_code(handle))
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return Running()
        # Not reaped yet, so the pid is still its own: the group can be cleared of what the leader left behind.
        _signal_group(child.pid, signal.SIGKILL)
        code = child.wait()
        del self._children[handle.pid]
        return Exited(code)

    def stop(self, handle: Handle, *, force: bool) -> None:
        if handle.pid in self._children or is_alive(handle):
            if force:
                _signal_group(handle.pid, signal.SIGKILL)
            else:
                # Only the leader: it drains its followers itself, in the order the exchange needs.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(handle.pid, signal.SIGTERM)

    def adopt(self, work_path: Path) -> Sequence[Handle]:
        """The last handle of every folder below `work_path`, and any living process of it that no handle names. `poll`
        tells which are alive; a dead one is worth having for its exit code."""
        found: list[Handle] = []
        for workdir in sorted(work_path.iterdir()) if work_path.is_dir() else []:
            handle = _read_handle(workdir / HANDLE_FILE)
            if handle is not None and not _lies_in(handle, workdir):
                handle = None  # a copy of another home: the process it names is the other agent's
            if handle is None or not is_alive(handle):
                handle = _by_command_line(workdir) or handle
            if handle is not None:
                found.append(handle)
        return found


def start_ticks(pid: int) -> int | None:
    """The start time of a living process, in clock ticks since boot. None: no such process, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(handle: Handle) -> bool:
    return handle.kernel_boot_id == kernel_boot_id() and start_ticks(handle.pid) == handle.start_ticks


def read_status(workdir: Path) -> dict[str, Any]:
    """What the trainer last said of itself; empty before its first word."""
    try:
        return msgspec.json.decode((workdir / STATUS_FILE).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def log_tail(workdir: Path, lines: int = TAIL_LINES) -> list[str]:
    """The end of the log, made harmless: no control characters, no endless line."""
    try:
        with open(workdir / LOG_FILE, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    clean = (_harmless(line) for line in text.splitlines())
    return [line[:_LINE_LIMIT] for line in clean if line.strip()][-lines:]


def _harmless(line: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def rotate(log: Path, limit: int = LOG_LIMIT_BYTES) -> None:
    """Copy, then truncate: the trainer holds the file open for appending and goes on writing at the new end. Lines that
    fall between the copy and the cut are lost, which a log can bear. A disk too full to copy still gets its space
    back."""
    try:
        if log.stat().st_size <= limit:
            return
        with contextlib.suppress(OSError):
            shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
    except OSError:
        return


def _environment(order: LaunchOrder) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    if order.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif order.gpu_indices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in order.gpu_indices)
    return environment


def _import_root() -> str:
    """`python -m` looks into the working directory first: the folder that holds this very package, so that the trainer
    is the agent's own version and not another one that lies where the agent was started."""
    return str(Path(__file__).resolve().parents[2])


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _told_exit_code(handle: Handle) -> int | None:
    """Not our child, so the kernel does not tell us: the trainer's own last word, if it is of this process."""
    status = read_status(Path(handle.workdir))
    code = status.get("exit_code")
    return code if status.get("pid") == handle.pid and isinstance(code, int) else None


def _lies_in(handle: Handle, workdir: Path) -> bool:
    try:
        return os.path.samefile(handle.workdir, workdir)
    except OSError:
        return False


def _read_handle(path: Path) -> Handle | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Handle)
    except (OSError, msgspec.DecodeError):
        return None


def _by_command_line(workdir: Path) -> Handle | None:
    """The session leader that was started with a configuration of this folder; its name carries the generation."""
    prefix = f"{workdir}/{CONFIG_PREFIX}"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            arguments = (entry / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
            if os.getsid(pid) != pid or entry.stat().st_uid != os.geteuid():
                continue
        except OSError:
            continue
        generation = next((a.removeprefix(prefix).removesuffix(".json") for a in arguments if a.startswith(prefix)), "")
        ticks = start_ticks(pid)
        if ticks is None or not generation.isdigit():
            continue
        now, age_of_boot = monotonic_ms(), ticks * 1000 // os.sysconf("SC_CLK_TCK")
        return Handle(
            assignment_id=workdir.name,
            generation=int(generation),
            pid=pid,
            start_ticks=ticks,
            kernel_boot_id=kernel_boot_id(),
            started_monotonic_ms=min(now, age_of_boot),  # counts suspended time too: later than true, never earlier
            started_at_ms=wall_ms() - max(0, now - age_of_boot),
            workdir=str(workdir),
        )
    return None
