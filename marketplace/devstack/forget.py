"""Removes all that the embedded stack keeps, wherever it had to put it: the other half of `make clean`."""

from __future__ import annotations

import fcntl
import shutil
import sys

from marketplace.devstack.postgres import Account, home
from marketplace.devstack.state import StateDir


def main() -> None:
    state = StateDir.from_environ()
    if not state.path.exists():
        return
    with open(state.lock, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"a stack runs on {state.path}: stop it first")
        shutil.rmtree(home(state.path, Account.for_servers()), ignore_errors=True)
        shutil.rmtree(state.path, ignore_errors=True)


if __name__ == "__main__":
    main()
