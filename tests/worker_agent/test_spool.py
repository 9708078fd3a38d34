from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.spool import COMPACT_LINES, Spool, inspect

BOOT = "boot"


def append(spool: Spool, key: str, total: int) -> int:
    return spool.append(key, total, observed_at_ms=1, counted_until_ms=total, kernel_boot_id=BOOT).seq


def totals(spool: Spool) -> dict[str, int]:
    return {key: entry.record.gpu_ms_total for key in spool.assignment_ids() if (entry := spool.latest(key))}


def test_a_record_survives_the_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 1)
    append(spool, "a", 10)
    again = Spool(tmp_path / "s", 1)
    assert [(r.seq, r.gpu_ms_total) for r in again.pending()] == [(1, 10)]
    assert append(again, "a", 20) == 2


def test_a_total_never_falls(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 1)
    append(spool, "a", 10)
    append(spool, "a", 3)
    assert totals(spool) == {"a": 10}


def test_another_epoch_begins_anew(tmp_path: Path) -> None:
    append(Spool(tmp_path / "s", 1), "a", 10)
    spool = Spool(tmp_path / "s", 2)
    assert spool.pending() == []
    assert append(spool, "a", 3) == 1
    assert totals(Spool(tmp_path / "s", 2)) == {"a": 3}


def test_up_to_when_was_counted_outlives_the_epoch(tmp_path: Path) -> None:
    append(Spool(tmp_path / "s", 1), "a", 10)
    for _ in range(2):  # as it was read, and as it was written back
        entry = Spool(tmp_path / "s", 2).latest("a")
        assert entry is not None
        assert (entry.record.gpu_ms_total, entry.counted_until_ms, entry.kernel_boot_id) == (0, 10, BOOT)


def test_the_file_stays_small_however_long_the_server_is_away(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 1)
    for total in range(COMPACT_LINES + 20):
        append(spool, "a", total)
    assert (tmp_path / "s").read_bytes().count(b"\n") < COMPACT_LINES
    assert totals(Spool(tmp_path / "s", 1)) == {"a": COMPACT_LINES + 19}


def test_a_full_disk_loses_no_count_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path / "s", 1)
    append(spool, "a", 10)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        real(descriptor, bytes(data)[:7])  # the kernel takes what fits, then refuses
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        append(spool, "a", 20)
        assert "No space left" in spool.problem
        assert [r.gpu_ms_total for r in spool.pending()] == [20]
        assert totals(Spool(tmp_path / "s", 1)) == {"a": 10}
    append(spool, "a", 30)
    assert spool.problem == ""
    assert totals(Spool(tmp_path / "s", 1)) == {"a": 30}


def test_an_acknowledgement_of_lost_numbers_renumbers_what_is_pending(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 1)
    append(spool, "a", 10)
    spool.acknowledge(7)
    assert [(r.seq, r.gpu_ms_total) for r in spool.pending()] == [(8, 10)]
    spool.acknowledge(8)
    assert spool.pending() == []


def test_a_look_from_outside_changes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 1)
    append(spool, "a", 10)
    before = (tmp_path / "s").read_bytes()
    state = inspect(tmp_path / "s")
    assert (state.assignments, state.pending, state.damaged_lines) == (1, 1, 0)
    assert (tmp_path / "s").read_bytes() == before


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from("abc"), st.integers(1, 50)),
        st.tuples(st.just("send"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("crash"), st.just(""), st.integers(0, 200)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_crashes_torn_tails_and_replays_neither_lose_nor_double_usage(steps: list[tuple[str, str, int]]) -> None:
    """The server keeps the highest total; `send` with 0 loses the reply, more delivers that many times. A crash cuts
    what is not yet acknowledged anywhere in its last line, as a kill during a write does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        spool = Spool(path, 1)
        used: dict[str, int] = {}
        server: dict[str, int] = {}
        sent: set[int] = set()
        acked = 0
        for verb, key, number in steps:
            if verb == "use":
                used[key] = used.get(key, 0) + number
                seq = append(spool, key, used[key])
                assert seq not in sent, "a number the server has seen is not used again"
            elif verb == "send":
                for record in spool.pending() * max(1, number):
                    server[record.assignment_id] = max(server.get(record.assignment_id, 0), record.gpu_ms_total)
                    acked = max(acked, record.seq)
                    sent.add(record.seq)
                if number:
                    spool.acknowledge(acked)
            else:
                content = path.read_bytes()
                last_line = content.rstrip(b"\n").rfind(b"\n") + 1
                # The base is renamed into place whole, and what was sent had been synced before: neither can be torn.
                if last_line > 0 and spool.next_seq - 1 not in sent:
                    path.write_bytes(content[: max(last_line, len(content) - number)])
                spool = Spool(path, 1)
                for key_, total in used.items():
                    survived = totals(spool).get(key_, 0)
                    assert survived <= total
                    used[key_] = max(survived, server.get(key_, 0))  # the meter goes on from what survived
        for key_, total in used.items():
            append(spool, key_, total)
        for record in spool.pending():
            server[record.assignment_id] = max(server.get(record.assignment_id, 0), record.gpu_ms_total)
        assert server == used


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_flipped_byte_never_invents_usage(position: int, flip: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        spool = Spool(path, 1)
        for total in (10, 20, 30):
            append(spool, "a", total)
        content = bytearray(path.read_bytes())
        content[position % len(content)] ^= flip
        path.write_bytes(bytes(content))
        again = Spool(path, 1)
        assert totals(again).get("a", 0) in (0, 10, 20, 30)
        assert append(again, "a", 40) > 3
