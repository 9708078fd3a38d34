"""Training alone: the recorded history of a seed, and the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from worker_agent.protocol import ModuleModel, RunSpec
from worker_agent.trainer.errors import SpecError
from worker_agent.trainer.state import load_snapshot
from worker_agent.trainer.train import main, train

HISTORY = Path(__file__).parent / "fixtures" / "history.json"


def test_a_seed_still_gives_the_history_that_was_recorded(small_run: RunSpec) -> None:
    """Rosters, tokens and bytes exactly; losses to what another processor's rounding can make of them."""
    recorded = json.loads(HISTORY.read_text())
    result = train(small_run, learners=2)
    assert [record.members for record in result.records] == [round["members"] for round in recorded["rounds"]]
    assert [record.tokens for record in result.records] == [round["tokens"] for round in recorded["rounds"]]
    assert [record.train_loss_nats for record in result.records] == pytest.approx(
        [round["train_loss_nats"] for round in recorded["rounds"]], abs=0.02
    )
    assert list(result.heldout_bits_per_byte.values()) == pytest.approx(recorded["heldout_bits_per_byte"], abs=0.03)


def test_more_learners_than_cores_take_turns_and_change_nothing(small_run: RunSpec) -> None:
    at_once, in_turn = train(small_run, learners=3, at_once=3), train(small_run, learners=3, at_once=1)
    assert at_once.state.digest() == in_turn.state.digest()


def test_a_learners_failure_ends_the_run_and_is_raised(small_run: RunSpec) -> None:
    broken = msgspec.structs.replace(small_run, model=ModuleModel(entry="no_such_module_anywhere:f", context=16))
    with pytest.raises(SpecError):
        train(broken, learners=2)
    with pytest.raises(ValueError, match="at least 1"):
        train(small_run, learners=0)


def options(text: Path, *more: str) -> list[str]:
    small = "--learners 2 --tokens 2000 --batch-tokens 128 --inner-steps 4 --layers 1 --heads 2 --width 16 --context 16"
    return [*small.split(), "--data", str(text), "--device", "cpu", *more]


def long_enough(text: Path) -> Path:
    text.write_text(text.read_text() * 3)  # the command line holds out 64 KiB
    return text


def test_the_command_prints_a_line_a_round_and_saves_what_it_trained(text: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    assert main(options(long_enough(text), "--save", str(tmp_path / "model.safetensors")), out) == 0
    lines = out.getvalue().splitlines()
    assert "2 learners" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert "held-out bits per byte" in out.getvalue()
    assert load_snapshot(tmp_path / "model.safetensors").round == 2
    assert "embedding.weight" in load_file(tmp_path / "model.safetensors")


def test_the_command_speaks_json_lines(text: Path) -> None:
    out = io.StringIO()
    assert main(options(long_enough(text), "--json"), out) == 0
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["begin", "round", "round", "end"]
    assert events[-1]["heldout_bits_per_byte"] < events[-1]["heldout_bits_per_byte_before"]


def test_the_command_takes_a_whole_specification(small_run: RunSpec, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(small_run))
    out = io.StringIO()
    assert main(["--run", str(path), "--learners", "2", "--json", "--device", "cpu"], out) == 0
    assert json.loads(out.getvalue().splitlines()[-1])["rounds"] == 4


def test_what_cannot_be_trained_is_said_in_words_and_exits_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path / "absent"), "--learners", "1"], io.StringIO()) == 1
    assert "data.path" in capsys.readouterr().err
