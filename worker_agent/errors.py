"""What can go wrong in the agent, as types; the command line turns each into an exit code and one sentence.

Invariant: every error a person may meet says what happened and what to do about it.
"""

from __future__ import annotations

EXIT_OK = 0  # done, drained, or healthy
EXIT_PROBLEM = 1  # an error, or doctor found a problem
EXIT_UNREACHABLE = 5  # the control plane did not answer
EXIT_UNAUTHORISED = 6  # the credential or join token is not accepted: revoked, fenced off, used or expired
EXIT_PROTOCOL = 7  # this agent is too old for the control plane
EXIT_BUSY = 8  # another agent runs on this home
EXIT_NOT_ENROLLED = 9  # no identity in this home


class AgentError(Exception):
    """Base of all errors the agent raises on purpose."""

    exit_code = EXIT_PROBLEM


class ServerUnreachable(AgentError):
    """No usable answer after all retries: connection, time-out, 5xx or 429. Never a reason to stop work by itself."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRefused(AgentError):
    """The control plane understood and said no; retrying the same request cannot help."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"the control plane refused the request ({status} {code}): {message}")
        self.status = status
        self.code = code


class Unauthorised(AgentError):
    """401 or 403: the credential (or join token) is not accepted."""

    exit_code = EXIT_UNAUTHORISED


class Revoked(Unauthorised):
    """The owner revoked this agent, or a newer enrolment of the island fenced it off."""


class Gone(Unauthorised):
    """410: the island this agent belonged to has been removed."""


class ProtocolTooOld(AgentError):
    exit_code = EXIT_PROTOCOL


class HomeBusy(AgentError):
    exit_code = EXIT_BUSY


class NotEnrolled(AgentError):
    exit_code = EXIT_NOT_ENROLLED


class StateDamaged(AgentError):
    """A file of the home cannot be read; the message names it. Never repaired by guessing."""


class LaunchFailed(AgentError):
    """The trainer process could not be started at all (no interpreter, no memory, no disk)."""
