"""Typed errors, and the one place where they become HTTP.

Invariant: a service raises a `Problem`; what reaches a client is always `{"code", "message", "fields": [...]}`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from rest_framework.response import Response

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FieldProblem:
    field: str
    message: str


class Problem(Exception):
    """Base of what a caller can be told. `code` is stable and part of the API."""

    status: ClassVar[int] = 400
    default_code: ClassVar[str] = "problem"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        fields: Iterable[FieldProblem] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.fields = tuple(fields)
        self.retry_after_s = retry_after_s

    @classmethod
    def at(cls, field: str, message: str, *, code: str | None = None) -> Self:
        """A problem of one field of the input, by its dotted path."""
        return cls(message, code=code, fields=[FieldProblem(field, message)])

    def body(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "fields": [{"field": problem.field, "message": problem.message} for problem in self.fields],
        }


class InvalidInput(Problem):
    status = 422
    default_code = "invalid"


class Unauthorised(Problem):
    status = 401
    default_code = "unauthorised"


class InsufficientFunds(Problem):
    status = 402
    default_code = "insufficient_funds"


class Forbidden(Problem):
    status = 403
    default_code = "forbidden"


class NotFound(Problem):
    """Also what another organisation's object looks like."""

    status = 404
    default_code = "not_found"


class Conflict(Problem):
    status = 409
    default_code = "conflict"


class Gone(Problem):
    status = 410
    default_code = "gone"


class TooLarge(Problem):
    status = 413
    default_code = "too_large"


class ProtocolTooOld(Problem):
    """The agent speaks a version we no longer do: it must be updated before anything else can help."""

    status = 426
    default_code = "protocol_too_old"


class TooMany(Problem):
    status = 429
    default_code = "too_many_requests"


class Busy(Problem):
    """A lock was not had in time: nothing was done, try again."""

    status = 503
    default_code = "busy"


BUSY_RETRY_S = 1


def busy() -> Busy:
    """What a caller is told of a database that is away, or did not get to it in time."""
    return Busy("we are busy; nothing was done, try again", retry_after_s=BUSY_RETRY_S)


def drf_exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Every error of the REST API in one shape. Unknown errors stay a 500 and are logged by Django."""
    # Imported here: importing DRF loads our authentication classes, which raise the errors of this module.
    from django.db import OperationalError
    from rest_framework.exceptions import ValidationError
    from rest_framework.response import Response
    from rest_framework.views import exception_handler

    headers: dict[str, str] = {}
    if isinstance(error, OperationalError):
        logger.warning("%s was not answered: %s", context["request"].path, error)
        error = busy()
    if isinstance(error, Problem):
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        return Response(error.body(), status=error.status, headers=headers)
    answer = exception_handler(error, context)
    if answer is None:
        return None
    if isinstance(error, ValidationError):
        problems = list(_flatten(error.detail, ""))
        answer.data = InvalidInput("some fields are not right", fields=problems).body()
        answer.status_code = InvalidInput.status
    else:
        detail = answer.data.get("detail", "") if isinstance(answer.data, dict) else answer.data
        code = str(getattr(detail, "code", None) or Problem.default_code)
        answer.data = {"code": code, "message": str(detail), "fields": []}
    return answer


def _flatten(detail: Any, path: str) -> Iterable[FieldProblem]:
    """DRF's nested error detail as (dotted path, message) pairs."""
    if isinstance(detail, dict):
        for key, value in detail.items():
            yield from _flatten(value, path if key == "non_field_errors" else f"{path}.{key}".lstrip("."))
    elif isinstance(detail, list):
        for position, value in enumerate(detail):
            nested = isinstance(value, dict | list)
            yield from _flatten(value, f"{path}.{position}".lstrip(".") if nested else path)
    else:
        yield FieldProblem(path, str(detail))
