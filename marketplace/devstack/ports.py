"""Ports on loopback: which are free, and the next best when one is taken."""

from __future__ import annotations

import errno
import socket

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen there now. As servers do, a just-closed port counts as free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def free_port() -> int:
    """Any free port, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def choose(preferred: int, tries: int = 20) -> int:
    """The preferred port, else the next free one above it, else any."""
    for port in range(preferred, min(preferred + tries, 65536)):
        if is_free(port):
            return port
    return free_port()
