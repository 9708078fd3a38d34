"""The exchange over HTTPS: JSON to the control plane with the member's token, blobs by the URLs it hands out.

Invariant: a failure to reach the other side is retried until the patience is used up, and only then is it
Unreachable; an answer that says stop (409 stale_generation, 410 gone) is never retried. A blob is used only after its
bytes have been hashed, and the member's token never goes to a blob URL: those are signed by themselves and may be
another party's.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urljoin

import httpx
import msgspec

from worker_agent.protocol import (
    Ack,
    AppliedRequest,
    BlobPutReply,
    BlobPutRequest,
    BlobRef,
    BlobUrlsReply,
    BlobUrlsRequest,
    ErrorReply,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Message,
    PollReply,
    PollRequest,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
)
from worker_agent.trainer.errors import BlobMissing, Gone, RequestRefused, StaleGeneration, TrainerError, Unreachable
from worker_agent.trainer.exchange import digest_of_file

API_PREFIX = "/api/agent/v1/"

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0
_DRAIN_PATIENCE_S = 10.0  # once asked to go: who asked will not wait for long
_BLOB_STREAMS = 4
_WRONG_BYTES_TRIES = 3
_CHUNK_BYTES = 1 << 20
_RETRIED_STATUS = frozenset({408, 425, 429})

R = TypeVar("R", bound=Message)
T = TypeVar("T")


class _TryAgain(Exception):
    """A failure worth repeating; the text is what Unreachable says in the end."""


class HttpExchange:
    """Thread-safe: the round loop and the watcher that polls beside it share one."""

    def __init__(
        self,
        coordinator_url: str,
        member_token: str,
        *,
        generation: int,
        instance: str,
        patience_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.generation = generation
        self.instance = instance
        self.patience_s = patience_s
        base = coordinator_url.rstrip("/")
        self._base = base + "/" if base.endswith(API_PREFIX.rstrip("/")) else base + API_PREFIX
        timeout = httpx.Timeout(30.0, connect=10.0)
        self._control = httpx.Client(
            headers={"Authorization": f"Bearer {member_token}"}, timeout=timeout, transport=transport
        )
        self._blobs = httpx.Client(
            timeout=httpx.Timeout(120.0, connect=10.0), transport=transport, follow_redirects=True
        )
        self._clock = clock
        self._jitter = jitter
        self._woken = threading.Event()
        self._sleep = sleep or self._wait

    # ------------------------------------------------------------------------------------------------------ control

    def join(self, request: JoinRequest) -> JoinReply:
        return self._call("training/join", request, JoinReply)

    def poll(self, request: PollRequest) -> PollReply:
        return self._call("training/poll", request, PollReply)

    def submit(self, request: SubmitRequest) -> SubmitReply:
        return self._call("training/submit", request, SubmitReply)

    def applied(self, request: AppliedRequest) -> None:
        self._call("training/applied", request, Ack)

    def snapshot(self, request: SnapshotRequest) -> None:
        self._call("training/snapshot", request, Ack)

    def leave(self, request: LeaveRequest) -> None:
        self._call("training/leave", request, Ack)

    def pause(self, milliseconds: int) -> None:
        self._sleep(milliseconds / 1000)

    def interrupt(self) -> None:
        """Stays set: once told to stop, the loop has no reason to wait for anything."""
        self._woken.set()

    def close(self) -> None:
        self._control.close()
        self._blobs.close()

    # -------------------------------------------------------------------------------------------------------- blobs

    def put_blob(self, path: Path) -> BlobRef:
        ref = digest_of_file(path)
        asked = BlobPutRequest(digest=ref.digest, size_bytes=ref.size_bytes)

        def attempt() -> None:
            reply = self._call("training/blobs", asked, BlobPutReply)
            if reply.exists:
                return
            with open(path, "rb") as file:
                headers = {"Content-Length": str(ref.size_bytes), **reply.headers}
                response = self._blobs.put(self._absolute(reply.url), content=_chunks(file), headers=headers)
            if response.status_code in (401, 403, 404):  # the signature may have run out on the way: ask for a new URL
                raise _TryAgain(f"the store answered {response.status_code} to a PUT")
            _check(response.status_code, lambda: response.content)

        self._persist(attempt)
        return ref

    def get_blobs(self, digests: Sequence[str], folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = {digest: folder / digest for digest in digests}
        missing = [digest for digest, path in paths.items() if not path.exists()]
        if not missing:
            return paths
        urls = self._call("training/blob-urls", BlobUrlsRequest(digests=missing), BlobUrlsReply).urls
        unknown = [digest for digest in missing if digest not in urls]
        if unknown:
            raise BlobMissing(f"the coordinator has no address for {len(unknown)} blobs, {unknown[0]} among them")
        with ThreadPoolExecutor(max_workers=min(_BLOB_STREAMS, len(missing))) as pool:
            list(pool.map(lambda digest: self._fetch(digest, urls[digest], paths[digest]), missing))
        return paths

    def _fetch(self, digest: str, url: str, path: Path) -> None:
        """Stream to a temporary file beside the target; the name appears only once the digest is right."""
        temporary = path.with_name(f".{digest}.{self.instance}.part")
        address = [url]
        wrong = 0

        def attempt() -> None:
            nonlocal wrong
            hasher = hashlib.sha256()
            with self._blobs.stream("GET", self._absolute(address[0])) as response:
                if response.status_code in (401, 403):
                    fresh = self._call("training/blob-urls", BlobUrlsRequest(digests=[digest]), BlobUrlsReply).urls
                    address[0] = fresh.get(digest, url)
                    raise _TryAgain(f"the store answered {response.status_code} to a GET")
                if response.status_code == 404:
                    raise BlobMissing(f"the store has no blob {digest}")
                _check(response.status_code, response.read)
                with open(temporary, "wb") as file:
                    for chunk in response.iter_bytes(_CHUNK_BYTES):
                        hasher.update(chunk)
                        file.write(chunk)
            if hasher.hexdigest() != digest:
                wrong += 1  # once may be a broken transfer; again is a broken object
                problem = f"the store sent other bytes under {digest}"
                raise BlobMissing(problem) if wrong >= _WRONG_BYTES_TRIES else _TryAgain(problem)
            os.replace(temporary, path)

        try:
            self._persist(attempt)
        finally:
            temporary.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------ retries

    def _call(self, path: str, request: Message, reply: type[R]) -> R:
        body = msgspec.json.encode(request)

        def attempt() -> R:
            response = self._control.post(self._base + path, content=body, headers={"Content-Type": "application/json"})
            _check(response.status_code, lambda: response.content)
            try:
                return msgspec.json.decode(response.content, type=reply)
            except msgspec.DecodeError as error:
                raise TrainerError(f"the answer to {path} cannot be read: {error}") from error

        return self._persist(attempt)

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Repeat with a growing, jittered delay: members cut off together must not come back together."""
        started = self._clock()
        delay = _FIRST_DELAY_S
        while True:
            try:
                return attempt()
            except (httpx.TransportError, _TryAgain) as error:
                wait = delay * (0.5 + self._jitter() / 2)
                patience_s = min(self.patience_s, _DRAIN_PATIENCE_S) if self._woken.is_set() else self.patience_s
                if self._clock() + wait >= started + patience_s:
                    raise Unreachable(f"no answer in {patience_s:g} s: {error}") from error
            self._sleep(wait)
            delay = min(delay * 2, _LONGEST_DELAY_S)

    def _wait(self, seconds: float) -> None:
        if self._woken.is_set():
            time.sleep(min(seconds, _FIRST_DELAY_S))  # draining: quick, but not a busy loop
        else:
            self._woken.wait(seconds)

    def _absolute(self, url: str) -> str:
        return urljoin(self._base, url)


def _check(status: int, body: Callable[[], bytes]) -> None:
    if status < 300:
        return
    if status >= 500 or status in _RETRIED_STATUS:
        raise _TryAgain(f"status {status}")
    try:
        problem = msgspec.json.decode(body(), type=ErrorReply)
    except msgspec.DecodeError:
        problem = ErrorReply(code="unknown", message="no readable reason was given")
    if status == 409 and problem.code == "stale_generation":
        raise StaleGeneration(problem.message)
    if status == 410:
        raise Gone(problem.message)
    details = "; ".join(f"{field.field}: {field.message}" for field in problem.fields)
    raise RequestRefused(status, problem.code, f"{problem.message} {details}".strip())


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
