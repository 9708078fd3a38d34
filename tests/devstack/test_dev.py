"""`manage.py dev` as a person meets it: real processes, ended in every way, and a look for what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from celery import Celery

from marketplace.celery import QUEUES
from marketplace.devstack.stack import AlreadyRunning, Stack
from marketplace.devstack.state import StateDir
from tests.devstack.toys import marked
from tests.servers import wait_until

pytestmark = pytest.mark.prove


@pytest.fixture
def state(stack_state: StateDir) -> StateDir:
    return stack_state


@contextlib.contextmanager
def dev(state: StateDir, mark: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[dict[str, Any]]]]:
    """`manage.py dev` that has come up, with what it said until then."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", "dev", "--json", "--state", str(state.path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOY_MARK": mark},
    )
    assert process.stdout is not None
    said: list[dict[str, Any]] = []
    try:
        with process.stdout:
            for line in process.stdout:
                said.append(json.loads(line))
                if "url" in said[-1]:
                    break
            yield process, said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_however_dev_ends_nothing_is_left_and_it_starts_again(how: signal.Signals, state: StateDir) -> None:
    mark = uuid.uuid4().hex
    with dev(state, mark, "--port", "0") as (process, said):
        assert httpx.get(said[-1]["url"] + "/healthz").status_code == 200
        assert len(marked(mark)) >= 5
        process.send_signal(how)
        code = process.wait(30)
    assert code == (-9 if how is signal.SIGKILL else 0)
    wait_until(lambda: marked(mark) == [], limit_s=15, what="nothing of the stack runs")
    wait_until(lambda: not _postgres_runs(state), limit_s=15, what="the database has ended")


def _postgres_runs(state: StateDir) -> bool:
    return (state.postgres / "postmaster.pid").exists()


def test_a_second_dev_on_the_same_state_is_told_who_holds_it(state: StateDir) -> None:
    with dev(state, uuid.uuid4().hex, "--port", "0", "--no-celery") as (first, _):
        second = subprocess.run(
            [sys.executable, "manage.py", "dev", "--state", str(state.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert f"already runs on {state.path} (process {first.pid})" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_taken_port_is_said_and_another_used(state: StateDir) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        taken = str(holder.getsockname()[1])
        with dev(state, uuid.uuid4().hex, "--port", taken, "--no-celery") as (_, said):
            assert any(f"port {taken} is taken, using" in event.get("what", "") for event in said)
            assert httpx.get(said[-1]["url"] + "/healthz").status_code == 200


def test_each_service_comes_back_after_it_was_killed(state: StateDir) -> None:
    with Stack(state, web_port=0, fragile=True) as stack:
        for name in ("web", "worker", "beat", "valkey", "postgres"):
            pid = stack.kill(name)
            stack.wait_ready(name)
            assert stack.pid(name) not in {None, pid}
        wait_until(
            lambda: httpx.get(stack.web_url + "/healthz").status_code == 200, limit_s=20, what="the web serves again"
        )
        with pytest.raises(AlreadyRunning), Stack(state, web_port=0):
            pass


def test_a_worker_that_stopped_taking_messages_is_replaced(state: StateDir) -> None:
    """As after a lost broker (celery#10205): connected and well to look at, while its queues grow."""
    with Stack(state, web_port=0, fragile=True) as stack:
        pid = stack.pid("worker")
        with Celery(broker=stack.env["BROKER_URL"]) as client:
            for queue in QUEUES:
                client.control.cancel_consumer(queue, reply=True, timeout=5)
        wait_until(
            lambda: any(event.service == "worker" and "code 75" in event.what for event in stack.events),
            limit_s=60,
            what="the worker has noticed and ended",
        )
        stack.wait_ready("worker")
        assert stack.pid("worker") != pid
