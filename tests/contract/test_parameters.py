"""What the control plane counts of a model, without torch, is what torch counts."""

from __future__ import annotations

import pytest

from marketplace.training.spec import parameters_of
from worker_agent.protocol import GptModel
from worker_agent.trainer.model import build_gpt


@pytest.mark.parametrize(
    "model",
    [
        GptModel(n_layer=1, n_head=1, d_model=8, context=8),
        GptModel(n_layer=3, n_head=4, d_model=64, context=32, vocab_size=1_000),
        GptModel(n_layer=2, n_head=2, d_model=32, context=16, tie_embeddings=False),
    ],
)
def test_a_gpt_has_as_many_parameters_as_it_is_priced_by(model: GptModel) -> None:
    spec = {"kind": "gpt", **{name: getattr(model, name) for name in model.__struct_fields__}}
    assert parameters_of(spec) == sum(each.numel() for each in build_gpt(model, seed=1).parameters())
