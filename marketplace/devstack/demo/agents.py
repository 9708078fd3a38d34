"""Clusters of the demo: real `archipelago-agent` processes on this machine, each with a home of its own.

Invariant: what was started here is ended here, trainers included, also when the demo fails or is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

DRAIN_LIMIT_S = 20.0


class AgentFailed(Exception):
    """The agent's command failed; the message holds its own words."""


class Cluster:
    """One agent and what it runs. `gpu_name` is what its simulated GPUs say they are."""

    def __init__(self, name: str, home: Path, server_url: str, *, gpus: int, gpu_name: str) -> None:
        self.name = name
        self.home = home
        self._server_url = server_url
        self._gpus, self._gpu_name = gpus, gpu_name
        self._pose = ["--simulate-gpus", str(gpus), "--gpu-name", gpu_name]
        self._log = home / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def enrol(self, join_token: str) -> str:
        """Exchange the join token for the agent's own credential; returns what the command said."""
        command = self._command("enroll", "--server", self._server_url, "--token", join_token, *self._pose)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=_environment(), check=False)
        if done.returncode != 0:
            raise AgentFailed(f"{self.name}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def run(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command("run", "--device", "cpu", *self._pose),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )

    def pull_the_plug(self) -> list[int]:
        """SIGKILL to the agent and to every trainer it runs, as a power cut would; returns the pids."""
        # The agent first: it must not see its trainers die, and start or report anything.
        return [*self.kill_agent(), *self.kill_trainers()]

    def kill_agent(self) -> list[int]:
        """SIGKILL to the agent alone: its trainers live on, for the next `run` to take over. Returns its pid."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return [process.pid]

    def kill_trainers(self) -> list[int]:
        """SIGKILL to every trainer of this home; returns their pids."""
        killed = []
        for pid in self.trainer_pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                killed.append(pid)
        return killed

    def stop(self) -> None:
        """SIGTERM, which drains; what does not leave in time, or has no agent any more, is killed."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DRAIN_LIMIT_S)
        self.pull_the_plug()

    def copied_to(self, home: Path) -> Cluster:
        """Another on a copy of this home, as out of a backup; it has said nothing yet."""
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns(self._log.name))
        return Cluster(self.name, home, self._server_url, gpus=self._gpus, gpu_name=self._gpu_name)

    def exit_code(self) -> int | None:
        """What the agent ended with; None while it runs, and before it did."""
        return None if self._process is None else self._process.poll()

    def said(self) -> str:
        """Everything its agent has said so far, over all its starts."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def trainer_pids(self) -> list[int]:
        """The session leaders that were started with a configuration out of this home."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
                ours = any(argument.startswith(f"{self.home}/work/") for argument in arguments)
                if ours and os.getsid(int(entry.name)) == int(entry.name):
                    found.append(int(entry.name))
        return found

    def _command(self, verb: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "worker_agent", verb, "--home", str(self.home), *more]


def _environment() -> dict[str, str]:
    """Nothing of the server's secrets: an agent has only what its own home holds."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "NO_PROXY", "no_proxy")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
