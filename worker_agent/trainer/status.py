"""What the trainer tells the agent beside it: one small file, replaced whole, and a log of it as JSON lines.

Invariant: a reader of `status.json` sees a complete record, never half of one. Writing is best effort: a full disk
must not end a training run that does not need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

STATUS_FILE = "status.json"
PROGRESS_FILE = "progress.jsonl"
_FILE_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 10.0

Phase = Literal[
    "starting",
    "catching_up",
    "waiting",
    "training",
    "submitting",
    "applying",
    "evaluating",
    "finishing",
    "done",
    "failed",
]


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The record. Counts are of the current order; None is unknown."""

    state: Phase
    pid: int
    at_ms: int
    round: int | None = None
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    loss_nats: float | None = None
    heldout_bits_per_byte: float | None = None
    state_digest: str | None = None
    exit_code: int | None = None
    message: str = ""


class StatusFile:
    """What says something new (another state, round or message) is always written. Repetitions (steps, waiting) are
    thinned out: the file is at most half a second old, the log has one in ten seconds."""

    def __init__(self, folder: Path | None, *, echo: Callable[[Status], None] | None = None) -> None:
        self._folder = folder
        self._echo = echo
        self._last: tuple[object, ...] = ()
        self._written_at = 0.0
        self._logged_at = 0.0

    def write(self, state: Phase, **fields: object) -> None:
        now = time.monotonic()
        subject = (state, fields.get("round"), fields.get("message"))
        repeated, self._last = subject == self._last, subject
        if repeated and now - self._written_at < _FILE_INTERVAL_S:
            return
        self._written_at = now
        record = msgspec.convert(
            {"state": state, "pid": os.getpid(), "at_ms": int(time.time() * 1000), **fields}, Status
        )
        logged = not repeated or now - self._logged_at >= _LOG_INTERVAL_S
        if logged:
            self._logged_at = now
            if self._echo is not None:
                self._echo(record)
        if self._folder is None:
            return
        line = msgspec.json.encode(record)
        try:
            temporary = self._folder / f".{STATUS_FILE}.tmp"
            temporary.write_bytes(line)
            os.replace(temporary, self._folder / STATUS_FILE)
            if logged:
                with open(self._folder / PROGRESS_FILE, "ab") as file:
                    file.write(line + b"\n")
        except OSError:
            self._folder = None  # said once by its absence: a status nobody can write is not worth a run
