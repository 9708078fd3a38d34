"""A small run, learners in threads, and the coordinator served over real HTTP on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from worker_agent.protocol import (
    Ack,
    AppliedRequest,
    BlobPutReply,
    BlobPutRequest,
    BlobUrlsReply,
    BlobUrlsRequest,
    ErrorReply,
    FilesData,
    GptModel,
    InnerSpec,
    JoinRequest,
    LeaveRequest,
    Message,
    PollRequest,
    RunSpec,
    SnapshotRequest,
    SubmitRequest,
    SyncSpec,
)
from worker_agent.trainer.errors import Gone, StaleGeneration
from worker_agent.trainer.exchange_local import LocalCoordinator

REQUESTS: dict[str, type[Message]] = {
    "join": JoinRequest,
    "poll": PollRequest,
    "submit": SubmitRequest,
    "applied": AppliedRequest,
    "snapshot": SnapshotRequest,
    "leave": LeaveRequest,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Forty kilobytes with structure to learn, the same on every machine."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of {i * 7 % 10} rows; next is {i + 1}.\n" for i in range(1300)))
    return path


@pytest.fixture
def small_run(text: Path) -> RunSpec:
    return RunSpec(
        job_id="job",
        seed=11,
        model=GptModel(n_layer=1, n_head=2, d_model=16, context=16),
        data=FilesData(path=str(text)),
        tokens=4 * 2 * 4 * 128,  # four rounds of two learners with four steps
        batch_tokens=128,
        heldout_bytes=1024,
        eval_bytes=1024,
        inner=InnerSpec(),
        sync=SyncSpec(inner_steps=4, round_deadline_ms=60_000),
        threads=1,
    )


class CoordinatorServer:
    """A LocalCoordinator behind the protocol's paths. The member's token is its name; `answers` are statuses to give
    first."""

    def __init__(self, coordinator: LocalCoordinator) -> None:
        self.coordinator = coordinator
        self.answers: list[int] = []
        self.seen: list[str] = []
        self.authorised_blob_requests = 0
        self.url_salt = 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(*served.answer(self.path, self.headers.get("Authorization", ""), body))

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                digest = served.blob_request(self.path, self.headers.get("Authorization"))
                if digest is None or hashlib.sha256(body).hexdigest() != digest:
                    self.reply(403, b"")
                    return
                (served.coordinator.store / digest).write_bytes(body)
                self.reply(200, b"")

            def do_GET(self) -> None:
                digest = served.blob_request(self.path, self.headers.get("Authorization"))
                path = served.coordinator.store / (digest or "absent")
                self.reply(*((200, path.read_bytes()) if path.exists() else (403 if digest is None else 404, b"")))

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        name = path.removeprefix("/api/agent/v1/training/")
        self.seen.append(name)
        if self.answers:
            status = self.answers.pop(0)
            return status, msgspec.json.encode(ErrorReply(code="told_to", message="by the test"))
        member_id = authorization.removeprefix("Bearer ")
        try:
            if name == "blobs":
                asked = msgspec.json.decode(body, type=BlobPutRequest)
                exists = (self.coordinator.store / asked.digest).exists()
                return 200, msgspec.json.encode(BlobPutReply(exists=exists, url=self.blob_url(asked.digest)))
            if name == "blob-urls":
                digests = msgspec.json.decode(body, type=BlobUrlsRequest).digests
                return 200, msgspec.json.encode(
                    BlobUrlsReply(urls={digest: self.blob_url(digest) for digest in digests})
                )
            call = getattr(self.coordinator, name)
            reply = call(member_id, msgspec.json.decode(body, type=REQUESTS[name]))
            return 200, msgspec.json.encode(Ack() if reply is None else reply)
        except StaleGeneration as error:
            return 409, msgspec.json.encode(ErrorReply(code="stale_generation", message=str(error)))
        except Gone as error:
            return 410, msgspec.json.encode(ErrorReply(code="gone", message=str(error)))

    def blob_url(self, digest: str) -> str:
        return f"/blobs/{digest}?signature={self.url_salt}"

    def blob_request(self, path: str, authorization: str | None) -> str | None:
        """The digest, where the signature is the one in force."""
        self.authorised_blob_requests += authorization is not None
        name, _, signature = path.removeprefix("/blobs/").partition("?signature=")
        return name if signature == str(self.url_salt) else None

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


Serve = Callable[[LocalCoordinator], CoordinatorServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[CoordinatorServer] = []

    def start(coordinator: LocalCoordinator) -> CoordinatorServer:
        servers.append(CoordinatorServer(coordinator))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """A trainer's configuration file, as the agent writes it."""

    def write(url: str, member_id: str, **more: object) -> Path:
        path = tmp_path / f"{member_id}.json"
        config = {
            "coordinator_url": url,
            "member_token": member_id,
            "generation": 1,
            "workdir": str(tmp_path / member_id),
        }
        path.write_text(json.dumps({**config, "device": "cpu", "patience_s": 20, **more}))
        path.chmod(0o600)
        return path

    return write
