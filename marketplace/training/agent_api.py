"""The calls of trainers. They bear their member's token; no session and no API key opens them."""

from __future__ import annotations

from django.http import HttpRequest

from marketplace.core.clock import database_now
from marketplace.fleet.wire import agent_view, bearer
from marketplace.training.services import blobs, coordinator
from worker_agent.protocol import (
    Ack,
    AppliedRequest,
    BlobPutReply,
    BlobPutRequest,
    BlobUrlsReply,
    BlobUrlsRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    PollReply,
    PollRequest,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
)


@agent_view(JoinRequest)
def join(request: HttpRequest, message: JoinRequest) -> JoinReply:
    return coordinator.join(bearer(request), message, database_now())


@agent_view(PollRequest)
def poll(request: HttpRequest, message: PollRequest) -> PollReply:
    return coordinator.poll(bearer(request), message, database_now())


@agent_view(SubmitRequest)
def submit(request: HttpRequest, message: SubmitRequest) -> SubmitReply:
    return coordinator.submit(bearer(request), message, database_now())


@agent_view(AppliedRequest)
def applied(request: HttpRequest, message: AppliedRequest) -> Ack:
    coordinator.applied(bearer(request), message, database_now())
    return Ack()


@agent_view(SnapshotRequest)
def snapshot(request: HttpRequest, message: SnapshotRequest) -> Ack:
    coordinator.snapshot(bearer(request), message, database_now())
    return Ack()


@agent_view(LeaveRequest)
def leave(request: HttpRequest, message: LeaveRequest) -> Ack:
    coordinator.leave(bearer(request), message, database_now())
    return Ack()


@agent_view(BlobPutRequest)
def put_blob(request: HttpRequest, message: BlobPutRequest) -> BlobPutReply:
    return blobs.put_blob(coordinator.recognise(bearer(request)), message, database_now())


@agent_view(BlobUrlsRequest)
def blob_urls(request: HttpRequest, message: BlobUrlsRequest) -> BlobUrlsReply:
    return blobs.blob_urls(coordinator.recognise(bearer(request)), message)
