"""A control plane for tests of the agent: stateful, over real HTTP on loopback, speaking protocol.py.

It keeps what the real one keeps (tokens used once, epochs, rotated credentials, high-water marks of usage) and can be
told to misbehave: lose a reply after committing, answer 500, refuse, revoke, rotate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.servers import wait_until
from worker_agent.protocol import (
    Assignment,
    EnrolReply,
    EnrolRequest,
    ErrorReply,
    SyncReply,
    SyncRequest,
    TrainOrder,
)


class ControlPlane:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tokens = {"join-1", "join-2"}
        self.credentials: set[str] = set()
        self.pending_rotation: str | None = None
        self.epoch = 0
        self.assignments: list[Assignment] = []
        self.usage: dict[str, int] = {}  # high-water mark
        self.acked_seq = 0
        self.syncs: list[SyncRequest] = []
        self.seen_credentials: list[str] = []
        self.faults: list[str] = []  # taken one a request: lose_reply | 500 | 429 | duplicate
        self.revoked = False
        self.down = False
        self.server_skew_ms = 0
        self.next_sync_ms = 150

    # -- what a test says and asks

    def now_ms(self) -> int:
        return int(time.time() * 1000) + self.server_skew_ms

    def assign(
        self,
        key: str,
        behaviour: str = "run-1",
        *,
        generation: int = 1,
        seconds: float = 60,
        gpus: int = 2,
        **more: Any,
    ) -> None:
        now = self.now_ms()
        with self.lock:
            self.assignments = [a for a in self.assignments if a.id != key]
            self.assignments.append(
                Assignment(
                    id=key,
                    generation=generation,
                    kind=more.pop("kind", "train"),
                    gpus=gpus,
                    start_at_ms=now,
                    stop_at_ms=now + int(seconds * 1000),
                    train=TrainOrder(job_id="job", member_id="m", generation=generation, member_token=behaviour),
                    **more,
                )
            )

    def change(self, key: str, **fields: Any) -> None:
        with self.lock:
            self.assignments = [msgspec.structs.replace(a, **fields) if a.id == key else a for a in self.assignments]

    def last(self) -> SyncRequest:
        return self.syncs[-1]

    def pid_of(self, key: str) -> int | None:
        with self.lock:
            reports = self.syncs[-1].processes if self.syncs else []
        return next((r.pid for r in reports if r.assignment_id == key and r.state in ("starting", "running")), None)

    def wait_for(self, condition: Any, what: str, limit_s: float = 15) -> None:
        wait_until(lambda: bool(condition()), limit_s=limit_s, what=what, every_s=0.02)

    def wait_syncs(self, more: int = 2) -> None:
        goal = len(self.syncs) + more
        self.wait_for(lambda: len(self.syncs) >= goal, f"{more} more syncs")

    # -- the calls

    def enrol(self, request: EnrolRequest) -> EnrolReply | tuple[int, ErrorReply]:
        if request.join_token not in self.tokens:
            return 401, ErrorReply(code="token_used", message="this join token was used")
        self.tokens.remove(request.join_token)
        self.epoch += 1
        self.acked_seq = 0
        credential = f"credential-{self.epoch}"
        self.credentials = {credential}
        return EnrolReply(
            agent_id="agt_1",
            island_id="isl_1",
            island_name="north",
            epoch=self.epoch,
            credential=credential,
            server_time_ms=self.now_ms(),
        )

    def sync(self, request: SyncRequest, credential: str) -> SyncReply | tuple[int, ErrorReply]:
        self.seen_credentials.append(credential)
        if self.revoked:
            return 401, ErrorReply(code="revoked", message="revoked by the owner")
        if credential not in self.credentials:
            return 401, ErrorReply(code="unauthorised", message="unknown credential")
        if request.epoch != self.epoch:
            return 409, ErrorReply(code="stale_epoch", message="enrolled anew")
        if credential == self.pending_rotation:
            self.credentials, self.pending_rotation = {credential}, None
        self.syncs.append(request)
        for record in request.usage:
            self.usage[record.assignment_id] = max(self.usage.get(record.assignment_id, 0), record.gpu_ms_total)
            self.acked_seq = max(self.acked_seq, record.seq)
        if self.pending_rotation is not None:
            self.credentials.add(self.pending_rotation)
        return SyncReply(
            server_time_ms=self.now_ms(),
            next_sync_ms=self.next_sync_ms,
            usage_acked_seq=self.acked_seq,
            assignments=list(self.assignments),
            island_state="online",
            credential=self.pending_rotation,
        )

    def answer(self, path: str, body: bytes, credential: str) -> tuple[int, msgspec.Struct | None]:
        """A None reply: the connection is cut without an answer."""
        with self.lock:
            fault = self.faults.pop(0) if self.faults else ""
            if self.down:
                return 0, None
            if fault in ("500", "429"):
                return int(fault), ErrorReply(code="fault", message="as told")
            reply: Any
            for _ in range(2 if fault == "duplicate" else 1):
                if path.endswith("/enrol"):
                    reply = self.enrol(msgspec.json.decode(body, type=EnrolRequest))
                else:
                    reply = self.sync(msgspec.json.decode(body, type=SyncRequest), credential)
            if fault == "lose_reply":
                return 0, None
            return reply if isinstance(reply, tuple) else (200, reply)


@contextmanager
def running_control_plane() -> Iterator[tuple[ControlPlane, str]]:
    plane = ControlPlane()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            credential = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, reply = plane.answer(self.path, body, credential)
            if reply is None:
                self.close_connection = True
                return
            content = msgspec.json.encode(reply)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield plane, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
