"""The exchange over real HTTP on the loopback interface: what is retried, what stops, what is never believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from worker_agent.protocol import JoinRequest, LeaveRequest, PollRequest, RunSpec
from worker_agent.trainer.errors import BlobMissing, Gone, RequestRefused, StaleGeneration, Unreachable
from worker_agent.trainer.exchange_http import HttpExchange
from worker_agent.trainer.exchange_local import LocalCoordinator


class Clock:
    """Sleeping is what makes time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def coordinator(small_run: RunSpec, tmp_path: Path) -> LocalCoordinator:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    coordinator.admit("m")
    return coordinator


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(coordinator: LocalCoordinator, serve: Callable[[LocalCoordinator], object]) -> object:
    return serve(coordinator)


@pytest.fixture
def exchange(server: object, clock: Clock) -> Iterator[HttpExchange]:
    exchange = HttpExchange(
        server.url,  # type: ignore[attr-defined]
        "m",
        generation=1,
        instance="i",
        patience_s=60,
        clock=clock,
        sleep=clock.sleep,
        jitter=lambda: 1.0,
    )
    yield exchange
    exchange.close()


def test_a_member_joins_polls_and_leaves(exchange: HttpExchange, small_run: RunSpec) -> None:
    joined = exchange.join(JoinRequest(generation=1, instance="i"))
    assert joined.run == small_run
    assert joined.snapshot is None
    assert exchange.poll(PollRequest(generation=1, instance="i", state_round=0)).command == "train"
    exchange.leave(LeaveRequest(generation=1, instance="i", reason="drain"))


def test_server_errors_are_retried_with_growing_pauses(exchange: HttpExchange, server: object, clock: Clock) -> None:
    server.answers += [500, 503, 429]  # type: ignore[attr-defined]
    assert exchange.join(JoinRequest(generation=1, instance="i")).member_id == "m"
    assert clock.slept == [0.2, 0.4, 0.8]


def test_patience_ends(exchange: HttpExchange, server: object, clock: Clock) -> None:
    server.answers += [500] * 100  # type: ignore[attr-defined]
    with pytest.raises(Unreachable):
        exchange.join(JoinRequest(generation=1, instance="i"))
    assert 50 < clock.now <= 60
    assert max(clock.slept) == 5.0


def test_who_is_asked_to_go_does_not_wait_long_for_an_answer(
    exchange: HttpExchange, server: object, clock: Clock
) -> None:
    server.answers += [500] * 100  # type: ignore[attr-defined]
    exchange.interrupt()
    with pytest.raises(Unreachable):
        exchange.leave(LeaveRequest(generation=1, instance="i", reason="drain"))
    assert clock.now <= 10


def test_nobody_listening_is_retried_and_then_unreachable(clock: Clock) -> None:
    exchange = HttpExchange(
        "http://127.0.0.1:1", "m", generation=1, instance="i", patience_s=1, clock=clock, sleep=clock.sleep
    )
    with pytest.raises(Unreachable):
        exchange.join(JoinRequest(generation=1, instance="i"))
    exchange.close()
    assert clock.slept


def test_a_taken_place_and_an_ended_assignment_are_told_apart_and_not_retried(
    exchange: HttpExchange, coordinator: LocalCoordinator, clock: Clock
) -> None:
    coordinator.admit("m")
    with pytest.raises(StaleGeneration):
        exchange.join(JoinRequest(generation=1, instance="i"))
    coordinator.end("m")
    with pytest.raises(Gone):
        exchange.join(JoinRequest(generation=1, instance="i"))
    assert clock.slept == []


def test_any_other_refusal_carries_its_code_and_is_not_retried(
    exchange: HttpExchange, server: object, clock: Clock
) -> None:
    server.answers += [422]  # type: ignore[attr-defined]
    with pytest.raises(RequestRefused) as caught:
        exchange.join(JoinRequest(generation=1, instance="i"))
    assert (caught.value.status, caught.value.code, clock.slept) == (422, "told_to", [])


def test_a_blob_goes_up_once_and_comes_down_whole_and_its_urls_never_see_the_token(
    exchange: HttpExchange, server: object, tmp_path: Path
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"payload" * 1000)
    ref = exchange.put_blob(path)
    assert exchange.put_blob(path) == ref
    fetched = exchange.get_blobs([ref.digest], tmp_path / "in")
    assert fetched[ref.digest].read_bytes() == path.read_bytes()
    assert server.authorised_blob_requests == 0  # type: ignore[attr-defined]
    before = len(server.seen)  # type: ignore[attr-defined]
    exchange.get_blobs([ref.digest], tmp_path / "in")
    assert len(server.seen) == before  # type: ignore[attr-defined]
    assert [entry.name for entry in (tmp_path / "in").iterdir()] == [ref.digest]


def test_other_bytes_under_a_digest_are_never_used(
    exchange: HttpExchange, coordinator: LocalCoordinator, tmp_path: Path
) -> None:
    (coordinator.store / ("a" * 64)).write_bytes(b"not what was asked for")
    with pytest.raises(BlobMissing):
        exchange.get_blobs(["a" * 64], tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []
    with pytest.raises(BlobMissing):
        exchange.get_blobs(["b" * 64], tmp_path / "in")


def test_a_signature_that_ran_out_is_asked_for_again(exchange: HttpExchange, server: object, tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"payload")
    ref = exchange.put_blob(path)
    signed = server.blob_url  # type: ignore[attr-defined]

    def expired_once(digest: str) -> str:
        server.blob_url = signed  # type: ignore[attr-defined]
        return f"/blobs/{digest}?signature=old"

    server.blob_url = expired_once  # type: ignore[attr-defined]
    assert exchange.get_blobs([ref.digest], tmp_path / "in")[ref.digest].read_bytes() == b"payload"
    server.blob_url = expired_once  # type: ignore[attr-defined]
    path.write_bytes(b"another")
    assert exchange.put_blob(path).size_bytes == 7


def test_the_address_may_come_with_or_without_the_path_of_the_api() -> None:
    for url in (
        "http://127.0.0.1:1",
        "http://127.0.0.1:1/",
        "http://127.0.0.1:1/api/agent/v1",
        "http://127.0.0.1:1/api/agent/v1/",
    ):
        seen: list[str] = []

        def answer(request: httpx.Request, seen: list[str] = seen) -> httpx.Response:
            seen.append(request.url.path)
            return httpx.Response(410, json={"code": "gone", "message": ""})

        exchange = HttpExchange(url, "m", generation=1, instance="i", transport=httpx.MockTransport(answer))
        with pytest.raises(Gone):
            exchange.join(JoinRequest(generation=1, instance="i"))
        exchange.close()
        assert seen == ["/api/agent/v1/training/join"]
