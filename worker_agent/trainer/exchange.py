"""How a member and its coordinator speak: the interface the learner is written against.

Invariant: every call may be repeated. What a call means is the member's state, never the history of calls; an answer
that was lost is asked for again.

Two implementations with one semantics: `exchange_http.HttpExchange` against the control plane and a blob store, and
`exchange_local.LocalExchange` against a coordinator in this process (tests, `train` alone, the benchmark).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from worker_agent.protocol import (
    AppliedRequest,
    BlobRef,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    PollReply,
    PollRequest,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
)


class Exchange(Protocol):
    """Calls raise StaleGeneration, Gone, Unreachable, RequestRefused or BlobMissing (see errors) and nothing of
    httpx."""

    generation: int
    instance: str

    def join(self, request: JoinRequest) -> JoinReply: ...

    def poll(self, request: PollRequest) -> PollReply: ...

    def put_blob(self, path: Path) -> BlobRef:
        """Store the file under its SHA-256. Nothing is sent when the store has it already."""
        ...

    def get_blobs(self, digests: Sequence[str], folder: Path) -> dict[str, Path]:
        """Fetch into `folder/<digest>`, each proved by its digest; a file already there is not fetched again."""
        ...

    def submit(self, request: SubmitRequest) -> SubmitReply: ...

    def applied(self, request: AppliedRequest) -> None: ...

    def snapshot(self, request: SnapshotRequest) -> None: ...

    def leave(self, request: LeaveRequest) -> None: ...

    def pause(self, milliseconds: int) -> None:
        """Wait this long, or less when something has happened that makes polling worth while."""
        ...

    def interrupt(self) -> None:
        """End a `pause` now. Called from a signal handler or another thread."""
        ...

    def close(self) -> None: ...


def digest_of_file(path: Path) -> BlobRef:
    hasher = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
            size += len(chunk)
    return BlobRef(digest=hasher.hexdigest(), size_bytes=size)
