"""The whole stack on this machine, as real processes: what `manage.py dev` and the kill tests run.

    with Stack(StateDir(path), web_port=0) as stack:
        httpx.get(stack.web_url); stack.kill("worker"); stack.wait_ready("worker")

Invariant: one stack a state folder, kept by a file lock that ends with the process; and nothing outlives the stack.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from marketplace.devstack import ports, services
from marketplace.devstack.postgres import STOP_SIGNAL, Account, Postgres, make_home
from marketplace.devstack.services import Service
from marketplace.devstack.state import POSTGRES_PORT, REPOSITORY, VALKEY_PORT, StateDir
from marketplace.devstack.supervise import Child, Event, ServiceFailed, Supervisor
from marketplace.devstack.valkey import Valkey

STRIPE_FAKE = "tests.fakes.stripe"
STRIPE_PORT = 12111
# Of the stack's own making; a deployment has real ones.
STRIPE_KEY = "sk_test_embedded"
STRIPE_WEBHOOK_SECRET = "whsec_embedded"  # noqa: S105 - known to the fake that signs with it
STRIPE_WEBHOOK_PATH = "/billing/stripe/webhook"


class AlreadyRunning(Exception):
    """Another stack holds this state folder."""


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Stack:
    """`web_port` 0 takes any free port; `celery` False leaves out worker and beat; `fragile` trades the database's
    safety for speed; `env` goes to every process of ours and has the last word."""

    def __init__(
        self,
        state: StateDir | None = None,
        *,
        web_port: int = 8000,
        celery: bool = True,
        debug: bool = False,
        fragile: bool = False,
        env: Mapping[str, str] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.state = state or StateDir.from_environ()
        self.events: list[Event] = []
        self._wanted_web_port = web_port
        self._celery, self._debug, self._fragile = celery, debug, fragile
        self._extra = dict(env or {})
        self._on_event = on_event
        self._env: dict[str, str] = {}
        self._web_port = 0
        self._supervisor: Supervisor | None = None
        self._closing = contextlib.ExitStack()

    # ---------------------------------------------------------------------------------------------------- what it is

    @property
    def env(self) -> dict[str, str]:
        """The environment in which a process of ours belongs to this stack."""
        return dict(self._env)

    @property
    def web_url(self) -> str:
        return f"http://127.0.0.1:{self._web_port}"

    def services(self) -> list[str]:
        return self._kept().names()

    def pid(self, name: str) -> int | None:
        return self._kept().pid(name)

    def starts(self, name: str) -> int:
        return self._kept().starts(name)

    def log(self, name: str) -> Path:
        return self.state.logs / f"{name}.log"

    # ------------------------------------------------------------------------------------------------- what it can do

    def start(self, name: str) -> None:
        """Start a service that is down, or at once one that waits to be started again; returns when it serves."""
        self._kept().start(name)

    def stop(self, name: str) -> None:
        self._kept().stop(name)

    def kill(self, name: str, *, revive: bool = True) -> int:
        """SIGKILL, as a crash. The supervisor starts it again, unless `revive` is False. Returns the pid it had."""
        return self._kept().kill(name, revive=revive)

    def wait_ready(self, name: str, limit_s: float = 60.0) -> None:
        self._kept().wait_ready(name, limit_s)

    def _kept(self) -> Supervisor:
        if self._supervisor is None:
            raise ServiceFailed("the stack is not running")
        return self._supervisor

    # ----------------------------------------------------------------------------------------------- coming and going

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything, the last started first. Safe to call twice, and from a stack that never came up."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()
        self._closing.close()

    def _open(self) -> None:
        self._hold_state()
        self._supervisor = Supervisor(self._tell)
        postgres, valkey, stripe_port = self._place()
        self._env = self._environment(postgres, valkey, stripe_port)
        self._supervisor.add(self._postgres_child(postgres))
        self._supervisor.add(self._valkey_child(valkey))
        for name in ("postgres", "valkey"):
            self._supervisor.want(name)
        for name in ("postgres", "valkey"):
            self._supervisor.start(name)
        postgres.ensure_database()
        self._supervisor.run_once(self._child(services.migrate()))
        for child in self._our_children(stripe_port):
            self._supervisor.add(child)
            self._supervisor.want(child.name)
        for name in self._supervisor.names():
            self._supervisor.start(name)

    def _hold_state(self) -> None:
        self.state.path.mkdir(parents=True, exist_ok=True)
        lock = open(self.state.lock, "a+")  # noqa: SIM115 - held open, and so locked, for as long as the stack is
        self._closing.callback(lock.close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise AlreadyRunning(
                f"a stack already runs on {self.state.path} (process {holder}): stop it, or choose another folder with"
                " --state or ARCHIPELAGO_STATE"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    def _place(self) -> tuple[Postgres, Valkey, int | None]:
        """Where each server listens: where it did last time if that is still free, else nearby, said aloud."""
        account = Account.for_servers()
        data = make_home(self.state.path, account)
        if data != self.state.path:
            self._note("postgres", f"its user cannot reach {self.state.path}, so the data is in {data}")
        password = self.state.secret("postgres_password")
        found = Postgres(data / "postgres", 0, password, fragile=self._fragile, account=account)
        found.clear_leftover()
        taken = {
            "postgres": self._port("postgres", self.state.port("postgres", POSTGRES_PORT)),
            "valkey": self._port("valkey", self.state.port("valkey", VALKEY_PORT)),
            "web": ports.free_port() if self._wanted_web_port == 0 else self._port("web", self._wanted_web_port),
        }
        stripe_port = None
        if "STRIPE_API_BASE" not in {**os.environ, **self._extra} and has_module(STRIPE_FAKE):
            stripe_port = taken["stripe"] = self._port("stripe", self.state.port("stripe", STRIPE_PORT))
        self.state.write_ports(taken)
        self._web_port = taken["web"]
        postgres = Postgres(found.directory, taken["postgres"], password, fragile=self._fragile, account=account)
        return postgres, Valkey(self.state.valkey, taken["valkey"], self.state.secret("valkey_password")), stripe_port

    def _port(self, name: str, preferred: int) -> int:
        port = ports.choose(preferred)
        if port != preferred:
            self._note(name, f"port {preferred} is taken, using {port}")
        return port

    def _environment(self, postgres: Postgres, valkey: Valkey, stripe_port: int | None) -> dict[str, str]:
        ours = {
            "ARCHIPELAGO_STATE": str(self.state.path),
            "DJANGO_SETTINGS_MODULE": "marketplace.settings",
            "DATABASE_URL": postgres.url(),
            "BROKER_URL": valkey.url(),
            "SECRET_KEY": self.state.secret("django_key"),
            "PUBLIC_URL": self.web_url,
            "DEBUG": "1" if self._debug else "0",
            "ARTIFACT_DIR": str(self.state.artifacts),
            "EMAIL_DIR": str(self.state.mail),
            "ACCOUNT_EMAIL_VERIFICATION": "optional",
            "STRIPE_SECRET_KEY": STRIPE_KEY,
            "STRIPE_WEBHOOK_SECRETS": STRIPE_WEBHOOK_SECRET,
            "STRIPE_WEBHOOK_URL": f"{self.web_url}{STRIPE_WEBHOOK_PATH}",
            "PYTHONUNBUFFERED": "1",
        }
        if stripe_port is not None:
            ours["STRIPE_API_BASE"] = f"http://127.0.0.1:{stripe_port}"
        ours |= self._extra
        # A variable given as a file elsewhere must not meet the value given here.
        return {**{k: v for k, v in os.environ.items() if k.removesuffix("_FILE") not in ours}, **ours}

    # --------------------------------------------------------------------------------------------------- its children

    def _postgres_child(self, postgres: Postgres) -> Child:
        return Child(
            "postgres",
            postgres.command(),
            {"LC_ALL": "C.UTF-8", "PATH": os.environ.get("PATH", "")},
            self.log("postgres"),
            Path("/"),
            ready=postgres.ready,
            before=postgres.prepare,
            stop_signal=STOP_SIGNAL,
            uid=postgres.account.uid,
            gid=postgres.account.gid,
        )

    def _valkey_child(self, valkey: Valkey) -> Child:
        return Child(
            "valkey",
            valkey.command(),
            {"PATH": os.environ.get("PATH", "")},
            self.log("valkey"),
            Path("/"),
            ready=valkey.ready,
            before=valkey.prepare,
        )

    def _our_children(self, stripe_port: int | None) -> list[Child]:
        from marketplace.celery import QUEUES

        children = []
        if stripe_port is not None:
            address = f"http://127.0.0.1:{stripe_port}/"
            children.append(self._child(services.stripe_fake(stripe_port), ready=lambda: _answers(address)))
        bind = f"127.0.0.1:{self._web_port}"
        children.append(self._child(services.web(bind), ready=lambda: _serves(f"{self.web_url}/healthz")))
        if self._celery:
            schedule = str(self.state.path / "celerybeat-schedule")
            children += [self._celery_child(services.worker(QUEUES)), self._celery_child(services.beat(schedule))]
        return children

    def _celery_child(self, service: Service) -> Child:
        alive = self.state.path / f"{service.name}.alive"
        return self._child(
            service,
            {"LIVENESS_FILE": str(alive)},
            ready=alive.exists,
            before=lambda: alive.unlink(missing_ok=True),
        )

    def _child(
        self,
        service: Service,
        env: Mapping[str, str] | None = None,
        *,
        ready: Callable[[], bool] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Child:
        command = [sys.executable if part == services.PYTHON else part for part in service.command]
        return Child(
            service.name,
            command,
            {**self._env, **dict(service.variables), **(env or {})},
            self.log(service.name),
            REPOSITORY,
            ready=ready,
            before=before,
        )

    # ------------------------------------------------------------------------------------------------------- its story

    def _note(self, service: str, what: str) -> None:
        self._tell(Event(datetime.now(UTC), service, what))

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)


def _answers(url: str) -> bool:
    """Whether something speaks HTTP there, whatever it says."""
    try:
        httpx.get(url, timeout=2)
    except httpx.HTTPError:
        return False
    return True


def _serves(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False
