"""The state directory: where the embedded stack keeps its data, its secrets and the ports it was given.

Pure standard library and no Django: the settings read it to find the embedded servers.
Invariant: a secret is created once, readable by its owner only, and never printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_STATE = REPOSITORY / ".archipelago"

# Where the servers are looked for before a stack has ever run here; nothing listens there by chance.
POSTGRES_PORT = 54329
VALKEY_PORT = 63799

DATABASE = "archipelago"
DATABASE_USER = "archipelago"


@dataclass(frozen=True)
class StateDir:
    path: Path

    @classmethod
    def from_environ(cls) -> StateDir:
        return cls(Path(os.environ.get("ARCHIPELAGO_STATE") or DEFAULT_STATE).resolve())

    @property
    def postgres(self) -> Path:
        return self.path / "postgres"

    @property
    def valkey(self) -> Path:
        return self.path / "valkey"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def mail(self) -> Path:
        return self.path / "mail"

    @property
    def lock(self) -> Path:
        return self.path / "stack.lock"

    def secret(self, name: str) -> str:
        """The secret of that name, created on first use; of two processes that create it at once, one wins."""
        file = self.path / "secrets" / name
        try:
            return file.read_text()
        except FileNotFoundError:
            pass
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        value = secrets.token_urlsafe(48)
        draft = file.with_name(f"{name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(value)
        try:
            # A hard link either makes the whole file visible or fails: no reader ever sees half a secret.
            os.link(draft, file)
        except FileExistsError:
            value = file.read_text()
        finally:
            draft.unlink()
        return value

    # ---------------------------------------------------------------------------------------------- where things are

    def write_ports(self, ports: dict[str, int]) -> None:
        """Say where the servers of the running stack listen, replacing what an earlier stack said."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f"stack.json.{os.getpid()}"
        draft.write_text(json.dumps({"ports": ports, "pid": os.getpid()}) + "\n")
        draft.replace(self.path / "stack.json")

    def _stack(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = json.loads((self.path / "stack.json").read_text())
            if isinstance(found, dict):
                return found
        return {}

    def port(self, name: str, default: int) -> int:
        return int(self._stack().get("ports", {}).get(name, default))

    def database_url(self) -> str:
        password = self.secret("postgres_password")
        port = self.port("postgres", POSTGRES_PORT)
        return f"postgresql://{DATABASE_USER}:{password}@127.0.0.1:{port}/{DATABASE}"

    def broker_url(self) -> str:
        return f"redis://:{self.secret('valkey_password')}@127.0.0.1:{self.port('valkey', VALKEY_PORT)}/0"
