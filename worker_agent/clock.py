"""Time for an agent that trusts neither its wall clock nor a server it cannot reach.

Invariant: server time is the kernel's monotonic clock plus an offset learned from replies, so a jump of the wall clock
moves no deadline and no bill. The monotonic clock is one for all processes of a boot, which is why the offset may be
kept across restarts of the agent together with the kernel's boot id.
"""

from __future__ import annotations

import time
from pathlib import Path

_DRIFT_PPM = 200  # how far two quartz clocks may part; an old estimate loses its precision at this rate


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def kernel_boot_id() -> str:
    """Differs after every reboot; empty where the kernel does not tell, and then nothing is carried over a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class ServerClock:
    """The server's time, estimated from request and reply. None until the first reply (or a kept offset)."""

    def __init__(self, offset_ms: int | None = None) -> None:
        self.offset_ms = offset_ms
        self._error_ms = 0 if offset_ms is None else 60_000
        self._seen_at_ms = 0

    def observe(self, server_time_ms: int, sent_ms: int, received_ms: int) -> None:
        """Half the round trip is the most the estimate can be wrong; a worse one than we hold is not taken."""
        error = (received_ms - sent_ms) // 2
        aged = self._error_ms + (received_ms - self._seen_at_ms) * _DRIFT_PPM // 1_000_000
        if self.offset_ms is not None and error > aged:
            return
        self.offset_ms = server_time_ms - (sent_ms + received_ms) // 2
        self._error_ms = error
        self._seen_at_ms = received_ms

    def server_ms(self, monotonic: int) -> int | None:
        return None if self.offset_ms is None else monotonic + self.offset_ms
