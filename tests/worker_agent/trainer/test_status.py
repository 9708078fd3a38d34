"""The status file: always whole, thinned where it repeats itself, and never a reason to stop."""

from __future__ import annotations

from pathlib import Path

import msgspec

from worker_agent.trainer.status import PROGRESS_FILE, STATUS_FILE, Status, StatusFile


def test_the_file_holds_the_last_record_and_the_log_what_was_new(tmp_path: Path) -> None:
    said: list[Status] = []
    status = StatusFile(tmp_path, echo=said.append)
    status.write("starting")
    for step in range(100):
        status.write("training", round=0, step=step, steps=100, loss_nats=5.0)
    status.write("applying", round=0)
    last = msgspec.json.decode((tmp_path / STATUS_FILE).read_bytes(), type=Status)
    assert (last.state, last.round, last.step) == ("applying", 0, None)
    assert [record.state for record in said] == ["starting", "training", "applying"]
    assert len((tmp_path / PROGRESS_FILE).read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [PROGRESS_FILE, STATUS_FILE]


def test_a_folder_that_cannot_be_written_is_given_up_and_not_raised(tmp_path: Path) -> None:
    said: list[Status] = []
    status = StatusFile(tmp_path / "absent", echo=said.append)
    status.write("starting")
    status.write("done", message="finished")
    assert [record.state for record in said] == ["starting", "done"]
