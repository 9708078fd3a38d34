"""Starting a child that dies with us, and ending it with everything it started.

Invariant: a child leads a process group of its own; ending the child ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SHIM = Path(__file__).with_name("shim.py")


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: IO[bytes] | int,
    cwd: Path | str,
    death_signal: signal.Signals = signal.SIGTERM,
    uid: int | None = None,
    gid: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command`, bound to this process's life.

    The kernel counts the *thread* that starts a child as its parent: call this from a thread that lives as long as the
    child is meant to.
    """
    user = ["-", "-"] if uid is None else [str(uid), str(gid)]
    shim = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), str(int(death_signal)), *user]
    return subprocess.Popen(
        [*shim, *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        start_new_session=True,
    )


def end(child: subprocess.Popen[bytes], *, how: signal.Signals = signal.SIGTERM, patience_s: float = 10.0) -> None:
    """Ask the child to stop, wait, then kill what is left of its group. Returns when the child is gone."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
    sweep(child)
    child.wait()


def sweep(child: subprocess.Popen[bytes]) -> None:
    """Kill whatever still runs in the child's group: what a killed parent left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
