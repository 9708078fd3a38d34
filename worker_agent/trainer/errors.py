"""What can go wrong between a member and its run, as types; `run` turns each into an exit code, in one place.

Invariant: an error that ends the process on purpose (another process took over, the assignment ended) is not a failure.
"""

from __future__ import annotations

EXIT_DONE = 0  # finished, told to stop, or drained
EXIT_ERROR = 1  # a defect or a refusal: the message is on stderr and in the status file
EXIT_STALE = 3  # another process holds this member's place now
EXIT_GONE = 4  # the assignment has ended
EXIT_UNREACHABLE = 5  # the coordinator did not answer for as long as the configured patience


class TrainerError(Exception):
    """Base of all errors the trainer raises on purpose."""

    exit_code = EXIT_ERROR


class SpecError(TrainerError):
    """The run specification cannot be trained as it stands; `field` names the part at fault."""

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
