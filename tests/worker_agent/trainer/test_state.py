"""Snapshots: whole or absent, provable, and readable with safetensors alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker_agent.protocol import GptModel
from worker_agent.trainer.errors import StateError
from worker_agent.trainer.layout import Layout
from worker_agent.trainer.model import build_gpt
from worker_agent.trainer.state import MOMENTUM_PREFIX, OuterState, load_snapshot, save_snapshot

SPEC = GptModel(n_layer=1, n_head=2, d_model=16, context=8)


@pytest.fixture
def state() -> OuterState:
    model = build_gpt(SPEC, seed=1)
    layout = Layout.of(model)
    return OuterState(7, layout, layout.flatten_model(model), torch.randn(layout.numel))


def test_a_snapshot_reads_back_to_the_same_state(state: OuterState, tmp_path: Path) -> None:
    save_snapshot(state, tmp_path / "s", job_id="j")
    back = load_snapshot(tmp_path / "s")
    assert (back.round, back.layout, back.digest()) == (7, state.layout, state.digest())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_equal_states_are_equal_files(state: OuterState, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_snapshot(state, tmp_path / name, job_id="j")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_model_loads_with_safetensors_alone(state: OuterState, tmp_path: Path) -> None:
    save_snapshot(state, tmp_path / "s", job_id="j")
    tensors = {name: value for name, value in load_file(tmp_path / "s").items() if not name.startswith(MOMENTUM_PREFIX)}
    model = build_gpt(SPEC, seed=2)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["head.weight"]
    assert not unexpected
    assert torch.equal(Layout.of(model).flatten_model(model), state.params)


def test_the_digest_covers_names_parameters_and_momentum(state: OuterState) -> None:
    other_names = Layout((("other", (state.layout.numel,)),))
    digests = {
        state.digest(),
        OuterState(7, other_names, state.params, state.momentum).digest(),
        OuterState(7, state.layout, state.params + 1e-3, state.momentum).digest(),
        OuterState(7, state.layout, state.params, state.momentum + 1e-3).digest(),
    }
    assert len(digests) == 4
    assert OuterState(8, state.layout, state.params, state.momentum).digest() == state.digest()


def test_a_damaged_or_foreign_file_is_refused(state: OuterState, tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_snapshot(state, path, job_id="j")
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 0x10
    path.write_bytes(whole)
    with pytest.raises(StateError):
        load_snapshot(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateError):
        load_snapshot(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(StateError):
        load_snapshot(path)
    with pytest.raises(StateError):
        load_snapshot(tmp_path / "absent")


def test_a_layout_refuses_other_names_and_shapes() -> None:
    layout = Layout((("a", (2, 3)),))
    assert layout.json == '[["a",[2,3]]]'
    with pytest.raises(StateError):
        layout.flatten({"b": torch.ones(2, 3)})
    with pytest.raises(StateError):
        layout.flatten({"a": torch.ones(3, 2)})
    with pytest.raises(StateError):
        Layout.from_json("[1]")
