"""Inner optimisers against torch's own, and schedules by the run's tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from worker_agent.protocol import GptModel, InnerSpec
from worker_agent.trainer.errors import SpecError
from worker_agent.trainer.model import build_gpt
from worker_agent.trainer.optim import AdamW, InnerOptimizer, Muon, hidden_matrices, orthogonalise, schedule_factor


def pair_of(shape: tuple[int, ...], seed: int = 1) -> tuple[nn.Parameter, nn.Parameter]:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values.clone()), nn.Parameter(values.clone())


def test_adamw_follows_torchs() -> None:
    ours, theirs = pair_of((6, 5))
    mine = AdamW([ours], weight_decay=0.1)
    peer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        ours.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        mine.step(0.01)
        peer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_muon_follows_torchs_but_for_the_precision_of_its_iteration(shape: tuple[int, int]) -> None:
    ours, theirs = pair_of(shape)
    mine = Muon([ours])
    peer = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.0, adjust_lr_fn="original")
    for step in range(5):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        mine.step(0.02)
        peer.step()
    assert torch.allclose(ours, theirs, atol=0.005)  # torch iterates in bf16


def test_matrices_of_one_shape_are_updated_together_as_they_would_be_alone() -> None:
    shapes = [(8, 20), (20, 8), (8, 20), (6, 6)]
    together = [pair_of(shape, seed)[0] for seed, shape in enumerate(shapes)]
    alone = [pair_of(shape, seed)[0] for seed, shape in enumerate(shapes)]
    for parameter, twin in zip(together, alone, strict=True):
        parameter.grad = torch.ones_like(parameter) + parameter.detach()
        twin.grad = parameter.grad.clone()
    Muon(together).step(0.1)
    for twin in alone:
        Muon([twin]).step(0.1)
    for parameter, twin in zip(together, alone, strict=True):
        assert torch.allclose(parameter, twin, atol=1e-5)


def test_orthogonalising_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_embeddings_and_the_head_are_not_hidden_matrices() -> None:
    model = build_gpt(GptModel(n_layer=2, n_head=2, d_model=16, context=8, tie_embeddings=False), seed=1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden = {names[id(parameter)] for parameter in hidden_matrices(model)}
    assert len(hidden) == 12
    assert not any("embedding" in name or "head" in name for name in hidden)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_schedule_starts_high_ends_at_its_fraction_and_never_rises_after_warm_up(schedule: str) -> None:
    inner = InnerSpec(schedule=schedule, warmup_tokens=100, final_lr_fraction=0.1)
    factors = [schedule_factor(inner, tokens_total=1000, position=position) for position in range(0, 1001, 10)]
    assert factors[0] < 0.02
    assert max(factors) <= 1.0
    after = factors[10:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert after[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_beyond_the_budget_the_schedule_stays_at_its_end() -> None:
    inner = InnerSpec(schedule="cosine", final_lr_fraction=0.1)
    assert schedule_factor(inner, tokens_total=1000, position=5000) == pytest.approx(0.1)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimizer = InnerOptimizer(model, InnerSpec(), tokens_total=10)
    model.weight.grad = torch.full((3, 3), float("nan"))
    assert optimizer.step(0) is False
    assert torch.equal(model.weight, before)


def test_a_large_gradient_is_clipped_to_the_norm_asked_for() -> None:
    model = nn.Linear(3, 3, bias=False)
    optimizer = InnerOptimizer(model, InnerSpec(optimizer="adamw", grad_clip=1.0), tokens_total=10)
    model.weight.grad = torch.full((3, 3), 100.0)
    assert optimizer.step(0)
    assert torch.linalg.vector_norm(model.weight.grad) == pytest.approx(1.0, abs=1e-4)


def test_a_learning_rate_of_zero_is_refused_by_name() -> None:
    with pytest.raises(SpecError) as caught:
        InnerOptimizer(nn.Linear(2, 2), InnerSpec(lr=0.0), tokens_total=10)
    assert caught.value.field == "inner.lr"
