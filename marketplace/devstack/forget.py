"""Removes all that the embedded stack keeps, wherever it had to put it: the other half of `make clean`."""

from __future__ import annotations

import fcntl
import shutil
import sys

from marketplace.devstack.postgres import Account, home
from marketplace.devstack.state import StateDir


class StillRuns(Exception):
    """A stack runs on that folder."""


def forget(state: StateDir) -> None:
    if not state.path.exists():
        return
    with open(state.lock, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StillRuns(f"a stack runs on {state.path}: stop it first") from None
        shutil.rmtree(home(state.path, Account.for_servers()), ignore_errors=True)
        shutil.rmtree(state.path, ignore_errors=True)


def main() -> None:
    state = StateDir.from_environ()
    # A demo's state lies inside, with servers' data of its own.
    try:
        for each in (StateDir(state.path / "demo"), state):
            forget(each)
    except StillRuns as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
