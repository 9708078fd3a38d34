"""The agent's home folder: identity, what it last heard from the control plane, and the lock that keeps agents single.

Invariant: a file here is either the old content or the new, whole, whatever kills the process in between; secrets are
readable by their owner only; and at most one agent holds the home at a time (the kernel drops the lock with the
process).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from worker_agent.errors import HomeBusy, NotEnrolled, StateDamaged
from worker_agent.protocol import Assignment, EnrolReply

DEFAULT_HOME = Path("~/.archipelago-agent")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

T = TypeVar("T")


class Identity(msgspec.Struct, kw_only=True, frozen=True):
    """Who this agent is. `previous_credential` is kept until the control plane has accepted `credential`, so that a
    crash at any point of a rotation leaves at least one that works."""

    server_url: str
    agent_id: str
    island_id: str
    island_name: str
    epoch: int
    credential: str
    previous_credential: str | None = None

    def rotated(self, credential: str) -> Identity:
        if credential == self.credential:
            return self
        return msgspec.structs.replace(self, credential=credential, previous_credential=self.credential)

    def settled(self) -> Identity:
        """The current credential was accepted: the previous one is not needed any more."""
        return self if self.previous_credential is None else msgspec.structs.replace(self, previous_credential=None)

    def fallen_back(self) -> Identity:
        """The current credential was refused: go on with the previous one."""
        return msgspec.structs.replace(
            self, credential=self.previous_credential or self.credential, previous_credential=None
        )


class Memory(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What was last heard from the control plane. `server_minus_monotonic_ms` holds only within one boot of the kernel,
    so a restarted agent can keep every stop deadline before it reaches the server again."""

    kernel_boot_id: str = ""
    server_minus_monotonic_ms: int | None = None
    last_sync_ms: int | None = None
    island_state: str = ""
    assignments: list[Assignment] = []


class Home:
    """Paths and whole-file reads and writes below one folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.json"

    @property
    def memory_path(self) -> Path:
        return self.path / "memory.json"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    @property
    def spool_path(self) -> Path:
        return self.path / "usage.spool"

    @property
    def work_path(self) -> Path:
        return self.path / "work"

    def workdir(self, assignment_id: str) -> Path:
        """The id comes from the network and becomes a folder's name: anything that could leave the home is refused."""
        if not _SAFE_NAME.fullmatch(assignment_id):
            raise StateDamaged(f"the assignment id {assignment_id!r} cannot name a folder")
        return self.work_path / assignment_id

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.work_path.mkdir(exist_ok=True, mode=0o700)

    def load_identity(self) -> Identity:
        identity = _read(self.identity_path, Identity)
        if identity is None:
            raise NotEnrolled(
                f"no identity in {self.path}: run `archipelago-agent enroll --server URL --token TOKEN` first"
            )
        return identity

    def save_identity(self, identity: Identity) -> None:
        write_atomic(self.identity_path, msgspec.json.encode(identity))

    def load_memory(self) -> Memory:
        """A damaged memory is forgotten, not fatal: the next sync tells everything again."""
        try:
            return _read(self.memory_path, Memory) or Memory()
        except StateDamaged:
            return Memory()

    def save_memory(self, memory: Memory) -> None:
        write_atomic(self.memory_path, msgspec.json.encode(memory))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home. Python's descriptors are not inherited, so a trainer that outlives the agent does not hold
        it."""
        self.create()
        descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeBusy(
                    f"another agent (process {_holder(descriptor)}) runs on {self.path}: "
                    "stop it, or give this one its own --home"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def holder_pid(self) -> int | None:
        """The process that holds the home now, or None."""
        try:
            descriptor = os.open(self.lock_path, os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = _holder(descriptor)
            return int(text) if text.isdigit() else None
        finally:
            os.close(descriptor)
        return None


def identity_from(reply: EnrolReply, server_url: str) -> Identity:
    return Identity(
        server_url=server_url,
        agent_id=reply.agent_id,
        island_id=reply.island_id,
        island_name=reply.island_name,
        epoch=reply.epoch,
        credential=reply.credential,
    )


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Temporary file, fsync, rename, fsync of the folder: after a return the content survives a power cut."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StateDamaged(f"{path} cannot be read: {error}") from error


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
