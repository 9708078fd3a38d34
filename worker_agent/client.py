"""The agent's side of the wire: two calls to the control plane, over connections the agent opens.

Invariants: nothing here listens; a request is retried only where a retry can help (connection errors, time-outs, 5xx,
429), with exponential back-off, full jitter and respect for Retry-After; every other failure is a typed error in words.
A sync may be sent twice without harm (all of it is level or cumulative); an enrolment whose reply was lost is not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec

from worker_agent.errors import (
    AgentError,
    Gone,
    ProtocolTooOld,
    RequestRefused,
    Revoked,
    ServerUnreachable,
    Unauthorised,
)
from worker_agent.protocol import EnrolReply, EnrolRequest, ErrorReply, SyncReply, SyncRequest

API_PATH = "/api/agent/v1/"
BACKOFF_FIRST_S = 0.5
BACKOFF_CAP_S = 30.0
_REVOKED_CODES = {"revoked", "stale_epoch", "fenced"}
_TOO_OLD_CODES = {"protocol_too_old", "upgrade_required"}

T = TypeVar("T")


def normalise_url(text: str) -> str:
    """`host`, `https://host/`, or the address with the API's path: one spelling. Without a scheme it is https."""
    text = text.strip()
    parts = urlsplit(text if "://" in text else f"https://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AgentError(f"{text!r} is not an address of a control plane: expected something like https://example.org")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise AgentError(f"the address {parts.scheme}://{parts.hostname} must carry no user, query or fragment")
    path = parts.path.rstrip("/")
    path = path.removesuffix(API_PATH.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc.lower(), path.rstrip("/"), "", ""))


def backoff_s(
    failures: int, jitter: float, retry_after_s: float | None = None, *, cap_s: float = BACKOFF_CAP_S
) -> float:
    """How long to wait after the n-th failure in a row (from 1); `jitter` in [0, 1). Never sooner than the server
    asks."""
    ceiling = min(cap_s, BACKOFF_FIRST_S * 2 ** min(failures - 1, 16))
    wait = ceiling * (0.5 + jitter / 2)
    return wait if retry_after_s is None else max(wait, min(retry_after_s, 10 * BACKOFF_CAP_S))


class Client:
    """`pause(seconds)` waits between attempts and returns True to give up early (the agent is being stopped)."""

    def __init__(
        self,
        server_url: str,
        *,
        attempts: int = 4,
        timeout_s: float = 15.0,
        pause: Callable[[float], bool] | None = None,
        rng: random.Random | None = None,
        user_agent: str = "archipelago-agent",
    ) -> None:
        self.server_url = normalise_url(server_url)
        self._attempts = attempts
        self._pause = _sleep if pause is None else pause
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            follow_redirects=False,  # a redirect would take the credential to another host
            headers={"Content-Type": "application/json", "Accept": "application/json", "User-Agent": user_agent},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def enrol(self, request: EnrolRequest) -> EnrolReply:
        return self._post("enrol", request, EnrolReply)

    def sync(self, request: SyncRequest, credential: str, *, attempts: int | None = None) -> SyncReply:
        return self._post("sync", request, SyncReply, credential=credential, attempts=attempts)

    def _post(
        self,
        path: str,
        message: msgspec.Struct,
        kind: type[T],
        *,
        credential: str | None = None,
        attempts: int | None = None,
    ) -> T:
        body = msgspec.json.encode(message)
        headers = {} if credential is None else {"Authorization": f"Bearer {credential}"}
        url = f"{self.server_url}{API_PATH}{path}"
        attempts = attempts or self._attempts
        failure = ""
        retry_after: float | None = None
        for attempt in range(1, attempts + 1):
            retry_after = None
            try:
                response = self._http.post(url, content=body, headers=headers)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.is_success:
                    return self._decode(response, kind)
                if response.status_code < 500 and response.status_code not in (408, 425, 429):
                    raise _refusal(response, self.server_url)
                failure = f"HTTP {response.status_code} {error_of(response).message}".strip()
                retry_after = _retry_after_s(response)
            if attempt < attempts and self._pause(backoff_s(attempt, self._rng.random(), retry_after)):
                break
        raise ServerUnreachable(f"{self.server_url} did not answer ({failure}); tried {attempt} times", retry_after)

    def _decode(self, response: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            # A captive portal or a wrong address answers 200 with a page: not this protocol, and not to be obeyed.
            raise ServerUnreachable(f"{self.server_url} answered something else than this protocol: {error}") from error


def _refusal(response: httpx.Response, server_url: str) -> AgentError:
    problem = error_of(response)
    status, code, said = response.status_code, problem.code, problem.message
    details = "; ".join(f"{field.field}: {field.message}" for field in problem.fields)
    said = f"{said} ({details})" if details else said
    if status == 426 or code in _TOO_OLD_CODES:
        return ProtocolTooOld(f"this agent is too old for {server_url}: update archipelago-agent. {said}".strip())
    if code in _REVOKED_CODES:
        return Revoked(
            f"{server_url} no longer accepts this agent: revoked, or enrolled anew elsewhere. {said}".strip()
        )
    if status in (401, 403):
        return Unauthorised(f"{server_url} does not accept the credential. {said}".strip())
    if status == 410 or code == "gone":
        return Gone(f"the island this agent belonged to is gone from {server_url}. {said}".strip())
    if 300 <= status < 400:
        target = response.headers.get("Location", "elsewhere")
        return RequestRefused(status, "redirect", f"it points to {target}; enrol with that address if you trust it")
    return RequestRefused(status, code, said)


def error_of(response: httpx.Response) -> ErrorReply:
    try:
        return msgspec.json.decode(response.content, type=ErrorReply)
    except msgspec.DecodeError:
        return ErrorReply(code="unknown", message=response.reason_phrase)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Only the form in seconds: the form with a date depends on a wall clock the agent does not trust."""
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdigit() and len(text) < 10 else None


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
