"""Servers for a test process: started here, bound to this process's life, side by side with those of other processes.

Invariant: a test process owns one numbered slot below the state directory, guarded by a file lock the kernel releases
when the process ends in whatever way. Data folders are kept between runs, because making one costs seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from marketplace.devstack.ports import free_port
from marketplace.devstack.postgres import STOP_SIGNAL, Account, Postgres, PostgresError, make_home
from marketplace.devstack.spawn import end, spawn
from marketplace.devstack.state import DATABASE_USER, StateDir
from marketplace.devstack.valkey import Valkey

START_LIMIT_S = 30.0
PASSWORD = "of-a-test-server"


@dataclass(frozen=True)
class TestPostgres:
    __test__ = False

    port: int
    user: str
    password: str

    def url(self, database: str) -> str:
        return f"postgresql://{self.user}:{self.password}@127.0.0.1:{self.port}/{database}"


def wait_until(condition: Callable[[], bool], *, limit_s: float, what: str, every_s: float = 0.05) -> None:
    """Poll a real server until it is so; the only place where a test lets real time pass."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {limit_s:g} s still not so: {what}")
        time.sleep(every_s)


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """A temporary folder that the database's user can reach, which pytest's own are not when we are root."""
    folder = Path(tempfile.mkdtemp(prefix="archipelago-test-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _slot() -> Iterator[Path]:
    """The first free slot, ours until this process ends."""
    slots = make_home(StateDir.from_environ().path, Account.for_servers()) / "tests"
    slots.mkdir(exist_ok=True)
    for number in itertools.count():
        lock: IO[str] = open(slots / f"slot-{number}.lock", "w")  # noqa: SIM115 - held open for as long as the slot is ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        with lock:
            yield slots / f"slot-{number}"
        return


@contextlib.contextmanager
def running_postgres() -> Iterator[TestPostgres]:
    with _slot() as slot:
        slot.mkdir(exist_ok=True)
        try:
            yield from _serve(slot)
        except PostgresError:
            # Data without fsync does not survive a power cut: start from nothing, once.
            shutil.rmtree(slot / "postgres", ignore_errors=True)
            yield from _serve(slot)


def _serve(slot: Path) -> Iterator[TestPostgres]:
    server = Postgres(slot / "postgres", free_port(), PASSWORD, fragile=True)
    server.prepare()
    with open(slot / "postgres.log", "wb") as log:
        child = spawn(
            server.command(),
            env={"LC_ALL": "C.UTF-8"},
            log=log,
            cwd="/",
            death_signal=STOP_SIGNAL,
            uid=server.account.uid,
            gid=server.account.gid,
        )
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not server.ready():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise PostgresError(
                        f"the test database did not start:\n{(slot / 'postgres.log').read_text()[-2000:]}"
                    )
                time.sleep(0.05)
            yield TestPostgres(server.port, DATABASE_USER, PASSWORD)
        finally:
            end(child, how=STOP_SIGNAL)


@contextlib.contextmanager
def running_valkey() -> Iterator[str]:
    """A broker of this process's own, on nothing but memory; its URL."""
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder:
        server = Valkey(Path(folder) / "valkey", free_port(), PASSWORD)
        server.prepare()
        with open(Path(folder) / "log", "wb") as log:
            child = spawn(server.command(), env={}, log=log, cwd="/")
            try:
                wait_until(server.ready, limit_s=START_LIMIT_S, what="the broker answers")
                yield server.url()
            finally:
                end(child)


@contextlib.contextmanager
def s3_server(bucket: str = "artifacts") -> Iterator[str]:
    """An empty S3 store with one bucket over real HTTP; yields its address. One at a time in a process: its objects are
    the process's."""
    # Here, because nobody else needs it and it takes a second to import.
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        httpx.post(f"{url}/moto-api/reset", trust_env=False).raise_for_status()
        httpx.put(f"{url}/{bucket}", trust_env=False).raise_for_status()
        yield url
    finally:
        server.stop()
