from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.clock import ServerClock
from worker_agent.meter import ADOPTION_CAP_MS, Meter
from worker_agent.spool import Spool


def meter_in(folder: Path, boot: str = "boot", epoch: int = 1) -> Meter:
    return Meter(Spool(folder / "s", epoch), boot)


def test_elapsed_time_is_multiplied_by_gpus(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    for now in (1000, 1500, 3000):
        meter.count("a", now, gpus=4, start_ms=0, stop_ms=10_000)
    assert meter.total("a") == 8000


def test_nothing_outside_the_window_is_counted(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    for now in (0, 5000, 30_000):
        meter.count("a", now, gpus=2, start_ms=2000, stop_ms=6000)
    assert meter.total("a") == 8000


def test_a_pause_is_not_counted(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    meter.count("a", 1000, gpus=1, start_ms=0, stop_ms=99_000)
    meter.pause_others(set())
    meter.count("a", 9000, gpus=1, start_ms=0, stop_ms=99_000, begin_ms=8000)
    assert meter.total("a") == 1000


def test_time_before_a_service_began_is_not_counted(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    meter.count("a", 1000, gpus=3, start_ms=0, stop_ms=99_000, begin_ms=1007)  # started while this tick was at work
    meter.count("a", 1100, gpus=3, start_ms=0, stop_ms=99_000, begin_ms=1007)
    assert meter.total("a") == 3 * 93


def test_an_adopted_process_goes_on_from_the_last_record(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    meter.count("a", 1000, gpus=2, start_ms=0, stop_ms=99_000)
    meter.count("a", 4000, gpus=2, start_ms=0, stop_ms=99_000)
    meter.record(4000, 0)
    meter.count("a", 5000, gpus=2, start_ms=0, stop_ms=99_000)  # lost with the process
    again = meter_in(tmp_path)
    again.adopt("a", 9000, started_ms=900)
    again.count("a", 10_000, gpus=2, start_ms=0, stop_ms=99_000)
    assert again.total("a") == 2 * 9000


def test_what_was_counted_before_an_enrolment_is_not_counted_again(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    meter.count("a", 1000, gpus=2, start_ms=0, stop_ms=99_000)
    meter.count("a", 4000, gpus=2, start_ms=0, stop_ms=99_000)
    meter.record(4000, 0)
    enrolled_anew = meter_in(tmp_path, epoch=2)
    enrolled_anew.adopt("a", 9000, started_ms=900)
    enrolled_anew.count("a", 10_000, gpus=2, start_ms=0, stop_ms=99_000)
    assert enrolled_anew.total("a") == 2 * 6000


def test_a_long_absence_is_claimed_only_up_to_the_cap(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    later = 10 * ADOPTION_CAP_MS
    meter.adopt("a", later, started_ms=0)
    meter.count("a", later, gpus=1, start_ms=0, stop_ms=10**9)
    assert meter.total("a") == ADOPTION_CAP_MS


def test_after_a_reboot_the_old_instant_means_nothing(tmp_path: Path) -> None:
    meter = meter_in(tmp_path)
    meter.count("a", 500_000, gpus=1, start_ms=0, stop_ms=10**9, begin_ms=499_000)
    meter.record(500_000, 0)
    again = meter_in(tmp_path, boot="another")
    again.count("a", 3000, gpus=1, start_ms=0, stop_ms=10**9, begin_ms=2000)
    assert again.total("a") == 2000


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(["tick", "record", "kill"])), max_size=40),
    gpus=st.integers(1, 8),
)
def test_kills_at_any_moment_neither_lose_nor_double_a_living_process(steps: list[tuple[int, str]], gpus: int) -> None:
    with TemporaryDirectory() as folder:
        meter, now, stop = meter_in(Path(folder)), 0, 60_000
        for elapsed, verb in steps:
            now += elapsed
            if verb == "kill":
                meter = meter_in(Path(folder))
                meter.adopt("a", now, started_ms=0)
            meter.count("a", now, gpus=gpus, start_ms=0, stop_ms=stop, begin_ms=0)
            if verb == "record":
                meter.record(now, 0)
            assert meter.total("a") == gpus * min(now, stop)


def test_the_server_clock_takes_the_better_estimate() -> None:
    clock = ServerClock()
    clock.observe(1_000_000, sent_ms=100, received_ms=120)
    assert clock.server_ms(200) == 1_000_090
    clock.observe(1_009_000, sent_ms=200, received_ms=8200)  # a reply that took 8 s says little
    assert clock.server_ms(200) == 1_000_090
