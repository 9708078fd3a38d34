"""What can go wrong between a member and its run, as types; `run` turns each into an exit code, in one place.

Invariant: an error that ends the process on purpose (another process took over, the assignment ended) is not a failure.
"""

from __future__ import annotations

from worker_agent.protocol import EXIT_ERROR, EXIT_GONE, EXIT_SPEC, EXIT_STALE, EXIT_UNREACHABLE


class TrainerError(Exception):
    """Base of all errors the trainer raises on purpose."""

    exit_code = EXIT_ERROR


class SpecError(TrainerError):
    """The run specification cannot be trained as it stands; `field` names the part at fault."""

    exit_code = EXIT_SPEC

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PayloadError(TrainerError):
    """Bytes which are not a well-formed payload for this run; `reason` is one word of the protocol's refusals."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class StateError(TrainerError):
    """A snapshot or manifest that does not fit the state this member holds: it has to join again."""


class BlobMissing(TrainerError):
    """The store no longer has a blob that was asked for, or sent other bytes under its digest."""


class RequestRefused(TrainerError):
    """The coordinator understood and said no (a 4xx other than the two below)."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code} ({status}): {message}")
        self.status = status
        self.code = code


class StaleGeneration(TrainerError):
    exit_code = EXIT_STALE


class Gone(TrainerError):
    exit_code = EXIT_GONE


class Unreachable(TrainerError):
    exit_code = EXIT_UNREACHABLE
