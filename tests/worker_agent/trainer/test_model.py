"""The built-in model is the same everywhere and really is causal; a user's own module is loaded as submitted."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from worker_agent.protocol import BuiltinData, GptModel, ModuleModel, RunSpec
from worker_agent.trainer.errors import SpecError
from worker_agent.trainer.layout import Layout
from worker_agent.trainer.model import build_gpt, load_model, mean_cross_entropy
from worker_agent.trainer.state import OuterState

SMALL = GptModel(n_layer=2, n_head=2, d_model=16, context=16)

OWN_MODULE = """
import torch
def build(config):
    model = torch.nn.Sequential(torch.nn.Embedding(256, config["width"]), torch.nn.Linear(config["width"], 256))
    def loss(model, inputs, targets):
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return model, loss
"""


def run_with(model: GptModel | ModuleModel, seed: int = 1) -> RunSpec:
    return RunSpec(job_id="j", seed=seed, model=model, data=BuiltinData(), tokens=1000)


def test_the_first_state_is_the_same_bits_on_every_machine() -> None:
    model = build_gpt(SMALL, seed=7)
    layout = Layout.of(model)
    assert (
        OuterState.initial(layout, layout.flatten_model(model)).digest()
        == "0e81e24a410ece49593c0e6d3af6420682b907fad5b3970be57102cbbce8891c"
    )


def test_another_seed_is_another_model_and_torchs_own_seed_does_not_matter() -> None:
    def first(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        model = build_gpt(SMALL, seed)
        return Layout.of(model).flatten_model(model)

    assert torch.equal(first(7, 1), first(7, 2))
    assert not torch.equal(first(7, 1), first(8, 1))


def test_a_tied_head_is_one_parameter_and_an_untied_one_two() -> None:
    tied, untied = (
        build_gpt(SMALL, 1),
        build_gpt(GptModel(n_layer=2, n_head=2, d_model=16, context=16, tie_embeddings=False), 1),
    )
    assert Layout.of(untied).numel - Layout.of(tied).numel == 256 * 16
    assert tied.head.weight is tied.embedding.weight


def test_a_position_sees_nothing_that_comes_after_it() -> None:
    model = build_gpt(SMALL, 1)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tokens = torch.arange(16).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 10:] = 99
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-5)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-3)


def test_lower_precision_runs_the_same_model() -> None:
    """On an accelerator the forward pass is autocast to bf16; a CPU can show that no operation minds."""
    model = build_gpt(SMALL, 1)
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mean_cross_entropy(model, tokens, tokens)
    loss.backward()
    assert loss.item() == pytest.approx(mean_cross_entropy(model, tokens, tokens).item(), abs=0.05)
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize(("field", "value"), [("d_model", 17), ("n_head", 0), ("vocab_size", 0)])
def test_a_configuration_that_cannot_be_built_names_its_field(field: str, value: int) -> None:
    spec = GptModel(**{"n_layer": 1, "n_head": 2, "d_model": 16, "context": 8, field: value})
    with pytest.raises(SpecError) as caught:
        build_gpt(spec, 1)
    assert caught.value.field == f"model.{field}"


def test_a_users_single_file_is_imported_by_the_name_in_its_entry(tmp_path: Path) -> None:
    artifact = tmp_path / "blob"
    artifact.write_text(OWN_MODULE)
    spec = ModuleModel(entry="own_model_file:build", artifact="a" * 64, config={"width": 8})
    loaded = load_model(run_with(spec), tmp_path, artifact)
    tokens = torch.zeros((2, 4), dtype=torch.long)
    assert loaded.loss(loaded.model, tokens, tokens).item() > 0
    again = load_model(run_with(spec), tmp_path, artifact)
    assert torch.equal(
        Layout.of(loaded.model).flatten_model(loaded.model), Layout.of(again.model).flatten_model(again.model)
    )


def test_a_users_zip_may_hold_a_package(tmp_path: Path) -> None:
    artifact = tmp_path / "blob"
    with zipfile.ZipFile(artifact, "w") as archive:
        archive.writestr("own_package/__init__.py", "")
        archive.writestr("own_package/net.py", OWN_MODULE)
    spec = ModuleModel(entry="own_package.net:build", artifact="b" * 64, config={"width": 8})
    assert load_model(run_with(spec), tmp_path, artifact).model is not None


@pytest.mark.parametrize("entry", ["nothing", "no_such_module_anywhere:f", "json:no_such_function", "json:dumps"])
def test_an_entry_that_is_no_model_is_refused_by_name(entry: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_model(run_with(ModuleModel(entry=entry)), tmp_path)
    assert caught.value.field == "model.entry"
