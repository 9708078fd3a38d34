from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from marketplace.devstack.supervise import (
    HOPELESS_AFTER,
    LONGEST_BACKOFF_S,
    Event,
    ServiceFailed,
    Supervisor,
    backoff_s,
    ending,
)
from tests.devstack.toys import FAMILY, SLEEPER, marked, toy
from tests.servers import wait_until


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def supervisor(told: list[Event]) -> Iterator[Supervisor]:
    supervisor = Supervisor(told.append)
    yield supervisor
    supervisor.close()


def test_patience_doubles_and_is_bounded() -> None:
    assert [backoff_s(n) for n in range(1, 5)] == [0.5, 1.0, 2.0, 4.0]
    assert backoff_s(100) == LONGEST_BACKOFF_S


def test_an_end_is_told_in_words() -> None:
    assert ending(3) == "ended with code 3"
    assert ending(-signal.SIGKILL) == "killed by SIGKILL"


def test_a_killed_child_is_started_again(supervisor: Supervisor, told: list[Event], tmp_path: Path) -> None:
    supervisor.add(toy("sleeper", SLEEPER, tmp_path))
    supervisor.start("sleeper")
    first = supervisor.kill("sleeper")
    supervisor.wait_ready("sleeper", 20)
    assert supervisor.pid("sleeper") not in {None, first}
    assert supervisor.starts("sleeper") == 2
    assert any(event.what == "killed by SIGKILL" for event in told)


def test_a_child_killed_without_revival_stays_down_until_it_is_started(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(toy("sleeper", SLEEPER, tmp_path))
    supervisor.start("sleeper")
    supervisor.kill("sleeper", revive=False)
    assert supervisor.pid("sleeper") is None
    supervisor.start("sleeper")
    assert supervisor.pid("sleeper") is not None


def test_what_a_killed_child_had_started_is_ended_with_it(supervisor: Supervisor, tmp_path: Path, mark: str) -> None:
    supervisor.add(toy("family", FAMILY, tmp_path, mark))
    supervisor.start("family")
    wait_until(lambda: len(marked(mark)) == 2, limit_s=20, what="parent and child run")
    supervisor.kill("family", revive=False)
    wait_until(lambda: marked(mark) == [], limit_s=20, what="neither runs")


def test_a_child_that_cannot_start_is_given_up_with_its_last_words(supervisor: Supervisor, tmp_path: Path) -> None:
    child = toy("broken", "import sys; sys.exit('no configuration, no service')", tmp_path)
    supervisor.add(replace(child, ready=lambda: False))
    with pytest.raises(ServiceFailed, match=r"ended with code 1.*no configuration, no service"):
        supervisor.start("broken")
    assert supervisor.starts("broken") >= HOPELESS_AFTER


def test_a_job_that_fails_is_told_with_its_last_words(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.run_once(toy("works", "print('fine')", tmp_path))
    with pytest.raises(ServiceFailed, match="fails failed: ended with code 1, last words: table is missing"):
        supervisor.run_once(toy("fails", "raise SystemExit('table is missing')", tmp_path))


def test_closing_ends_everything_even_what_ignores_the_request(tmp_path: Path, mark: str) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
    supervisor = Supervisor()
    for name, code in {"stubborn": stubborn, "family": FAMILY}.items():
        supervisor.add(toy(name, code, tmp_path, mark))
        supervisor.start(name)
    wait_until(lambda: len(marked(mark)) == 3, limit_s=20, what="all run")
    supervisor.close()
    assert marked(mark) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_supervisor_however_that_ends(how: signal.Signals, tmp_path: Path, mark: str) -> None:
    """SIGTERM and SIGINT here meet a supervisor without handlers: it dies at once, and tidies nothing."""
    program = f"""
import signal, time, pathlib, sys
sys.path.insert(0, {str(Path.cwd())!r})
signal.signal(signal.SIGINT, signal.SIG_DFL)
from marketplace.devstack.supervise import Supervisor
from tests.devstack.toys import toy, SLEEPER
supervisor = Supervisor()
for name in ("one", "two"):
    supervisor.add(toy(name, SLEEPER, pathlib.Path({str(tmp_path)!r}), {mark!r}))
    supervisor.start(name)
print("up", flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"up\n"
        wait_until(lambda: len(marked(mark)) == 2, limit_s=20, what="both children run")
        os.kill(parent.pid, how)
        parent.wait(10)
    wait_until(lambda: marked(mark) == [], limit_s=10, what="no child of the dead supervisor runs")
