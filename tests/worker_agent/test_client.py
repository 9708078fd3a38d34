from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker_agent.control_plane import ControlPlane, running_control_plane
from worker_agent.client import BACKOFF_CAP_S, Client, backoff_s, normalise_url
from worker_agent.errors import AgentError, RequestRefused, Revoked, ServerUnreachable, Unauthorised
from worker_agent.protocol import PROTOCOL_VERSION, SyncRequest

REQUEST = SyncRequest(protocol=PROTOCOL_VERSION, epoch=0, boot_id="b", beat=1, agent_time_ms=0)


class Pauses(list[float]):
    def __call__(self, seconds: float) -> bool:
        self.append(seconds)
        return False


@pytest.fixture
def plane() -> Iterator[tuple[ControlPlane, Client, Pauses]]:
    with running_control_plane() as (plane, url):
        plane.credentials = {"c"}
        pauses = Pauses()
        with Client(url, pause=pauses) as client:
            yield plane, client, pauses


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("example.org", "https://example.org"),
        (" https://Example.org/ ", "https://example.org"),
        ("http://127.0.0.1:8000/api/agent/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/market/api/agent/v1", "https://example.org/market"),
    ],
)
def test_an_address_has_one_spelling(typed: str, meant: str) -> None:
    assert normalise_url(typed) == meant


@pytest.mark.parametrize(
    "typed", ["", "ftp://example.org", "https://", "https://user:secret@example.org", "https://x/?a=1"]
)
def test_what_is_no_address_is_refused_in_words(typed: str) -> None:
    with pytest.raises(AgentError):
        normalise_url(typed)


def test_a_failing_server_is_tried_again(plane: tuple[ControlPlane, Client, Pauses]) -> None:
    control, client, pauses = plane
    control.faults = ["500", "lose_reply"]
    assert client.sync(REQUEST, "c").island_state == "online"
    assert len(pauses) == 2


def test_retry_after_is_honoured(plane: tuple[ControlPlane, Client, Pauses]) -> None:
    control, client, pauses = plane
    control.faults = ["429"]
    client.sync(REQUEST, "c")
    assert pauses[0] >= 1.0


def test_a_refusal_is_not_tried_again(plane: tuple[ControlPlane, Client, Pauses]) -> None:
    control, client, pauses = plane
    with pytest.raises(Unauthorised):
        client.sync(REQUEST, "wrong")
    control.revoked = True
    with pytest.raises(Revoked):
        client.sync(REQUEST, "c")
    assert pauses == []


def test_a_server_that_stays_away_is_an_error_in_words(plane: tuple[ControlPlane, Client, Pauses]) -> None:
    control, client, pauses = plane
    control.down = True
    with pytest.raises(ServerUnreachable, match="tried 4 times"):
        client.sync(REQUEST, "c")
    assert len(pauses) == 3


def test_a_closed_port_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with (
            Client(f"http://127.0.0.1:{taken.getsockname()[1]}", attempts=1) as client,
            pytest.raises(ServerUnreachable),
        ):
            client.sync(REQUEST, "c")


def test_errors_keep_what_the_server_said() -> None:
    assert "because" in str(RequestRefused(422, "bad", "because"))


@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded_and_jittered(failures: int, jitter: float) -> None:
    assert 0.25 <= backoff_s(failures, jitter) <= BACKOFF_CAP_S
    assert 0.25 <= backoff_s(failures, jitter, cap_s=2) <= 2
