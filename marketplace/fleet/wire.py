"""How a call of an agent or trainer becomes a typed message and its answer becomes JSON.

    @agent_view(SyncRequest)
    def sync(request: HttpRequest, message: SyncRequest) -> SyncReply:
        return services.sync(bearer(request), message, now=database_now())

    urlpatterns = [path("api/agent/v1/sync", sync)]

The handler gets the decoded message and returns a message of `worker_agent.protocol`; a refusal is a raised Problem.
`bearer(request)` is the credential of the call; `demand_protocol(message.protocol)` refuses agents that are too old.
The handler opens its own transactions. Only POST is answered, without CSRF: there is no cookie in it to abuse.

Invariant: every answer of such a view, also to what we did not foresee, is JSON the agent can read: the reply's own
type with 200, or an ErrorReply.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import msgspec
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.views.decorators.csrf import csrf_exempt

from marketplace.core.errors import Busy, InvalidInput, Problem, ProtocolTooOld, TooLarge, Unauthorised
from worker_agent.protocol import PROTOCOL_VERSION, ErrorReply, FieldProblem

logger = logging.getLogger(__name__)

# What an agent may send at once. Usage is the largest part: some hundred bytes a record, 500 records a sync.
BODY_LIMIT_BYTES = 1024 * 1024
# We answer this version and the ones after it; messages only grow, so a newer agent is understood.
OLDEST_PROTOCOL = PROTOCOL_VERSION
BUSY_RETRY_S = 1

M = TypeVar("M", bound=msgspec.Struct)
View = Callable[[HttpRequest], HttpResponse]


class NotAllowed(Problem):
    status = 405
    default_code = "method_not_allowed"


def agent_view(
    kind: type[M], *, limit_bytes: int = BODY_LIMIT_BYTES
) -> Callable[[Callable[[HttpRequest, M], msgspec.Struct]], View]:
    """A Django view of a handler that takes the request and a message of `kind`, and returns a message."""

    def decorate(handler: Callable[[HttpRequest, M], msgspec.Struct]) -> View:
        @csrf_exempt
        @wraps(handler)
        def view(request: HttpRequest) -> HttpResponse:
            try:
                if request.method != "POST":
                    raise NotAllowed("this call is a POST")
                return _answer(handler(request, decode(_body(request, limit_bytes), kind)), 200)
            except Problem as problem:
                return refusal(problem)
            except UnreadablePostError:
                return refusal(Problem("the body ended before its length was reached", code="unreadable_body"))
            except OperationalError as error:
                # A lock not had in time, or a database that is away: nothing was done, and the agent calls again.
                logger.warning("%s was not answered: %s", request.path, error)
                return refusal(Busy("the control plane is busy; nothing was done", retry_after_s=BUSY_RETRY_S))
            except Exception:
                # An agent cannot read Django's page of an error; it can read this, and tries again.
                logger.exception("%s failed", request.path)
                return _answer(ErrorReply(code="internal", message="the control plane failed; it is in its log"), 500)

        return view

    return decorate


def bearer(request: HttpRequest) -> str:
    """The secret of `Authorization: Bearer ...`."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthorised("this call needs Authorization: Bearer and a credential")
    return secret.strip()


def demand_protocol(version: int) -> None:
    if version < OLDEST_PROTOCOL:
        raise ProtocolTooOld(
            f"the agent speaks protocol {version}, the oldest understood is {OLDEST_PROTOCOL}: update archipelago-agent"
        )


def decode(body: bytes, kind: type[M]) -> M:
    """The message, or a Problem that names the field: 422 for what has the wrong type, 400 for what is no JSON."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field, words = _place(str(error))
        raise InvalidInput.at(field, words) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(f"the body is not JSON: {error}", code="malformed") from error


def refusal(problem: Problem) -> HttpResponse:
    fields = [FieldProblem(field=each.field, message=each.message) for each in problem.fields]
    response = _answer(ErrorReply(code=problem.code, message=problem.message, fields=fields), problem.status)
    if problem.retry_after_s is not None:
        response["Retry-After"] = str(problem.retry_after_s)
    if isinstance(problem, NotAllowed):
        response["Allow"] = "POST"
    return response


def _body(request: HttpRequest, limit_bytes: int) -> bytes:
    # Judged by what is announced, before a byte of it is read.
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or int(length) > limit_bytes:
        raise TooLarge(f"at most {limit_bytes:,} bytes can be sent in one call")
    return request.body


def _answer(message: msgspec.Struct, status: int) -> HttpResponse:
    response = HttpResponse(msgspec.json.encode(message), content_type="application/json", status=status)
    response["Cache-Control"] = "no-store"  # it may hold a credential
    return response


def _place(text: str) -> tuple[str, str]:
    """msgspec's "Expected `int`, got `str` - at `$.facts.gpus[0].index`" as (`facts.gpus.0.index`, words)."""
    words, _, where = text.partition(" - at ")
    path = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where.strip("`")).removeprefix("$").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", words)
    if missing:
        return f"{path}.{missing[1]}".lstrip("."), "this field is required"
    return path, words
