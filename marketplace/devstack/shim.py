"""Runs a command so that it cannot outlive its parent; a file of its own, run by path, standard library only.

    python -I -S shim.py PARENT_PID SIGNAL UID GID COMMAND...

Gives up privileges when UID is not "-", then binds the process's life to its parent's, then becomes the command.
On Linux the kernel does the binding (PR_SET_PDEATHSIG). It is cleared when a process changes its user, so it is set
after that; and a parent that died before it was set is noticed by looking again. Elsewhere a small watcher process
stands in: it polls for the parent and passes the signal on.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 0.5


def _watch(parent_pid: int, child_pid: int, death_signal: int) -> None:
    """The fallback where the kernel has no such promise: wait for either end, then signal the child."""
    while os.getppid() == child_pid:
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            os.kill(child_pid, death_signal)
            return
        except PermissionError:
            pass
        time.sleep(WATCH_INTERVAL_S)


def main(arguments: list[str]) -> None:
    parent_pid, death_signal = int(arguments[0]), int(arguments[1])
    uid, gid, command = arguments[2], arguments[3], arguments[4:]
    if uid != "-":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    elif os.fork() == 0:
        # The watcher is the child: the command keeps the pid its supervisor knows.
        _watch(parent_pid, os.getppid(), death_signal)
        os._exit(0)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")
    # The supervisor starts us with these blocked or ignored in some shells; the command decides for itself.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_DFL)
    os.execv(command[0], command)  # noqa: S606 - becoming the command, without a shell, is the point


if __name__ == "__main__":
    main(sys.argv[1:])
