"""The outer step against a second, naive implementation, and what must hold of it whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.protocol import BlobRef, Manifest, ManifestEntry, OuterSpec
from worker_agent.trainer.errors import PayloadError, StateError
from worker_agent.trainer.layout import Layout
from worker_agent.trainer.model import exact_uniform
from worker_agent.trainer.outer import apply_manifest, coefficients, pseudo_gradient
from worker_agent.trainer.state import OuterState


def state_of(params: torch.Tensor, momentum: torch.Tensor | None = None, round: int = 0) -> OuterState:
    layout = Layout((("w", (params.numel(),)),))
    return OuterState(round, layout, params, torch.zeros_like(params) if momentum is None else momentum)


def manifest_of(weights: list[int], clips: list[float] | None = None, round: int = 0) -> Manifest:
    entries = [
        ManifestEntry(member_id=f"m{i}", blob=BlobRef(digest=str(i), size_bytes=1), weight=weight, clip=clip)
        for i, (weight, clip) in enumerate(zip(weights, clips or [1.0] * len(weights), strict=True))
    ]
    return Manifest(round=round, entries=entries, tokens_before=0, tokens=sum(weights))


def payloads_of(vectors: list[torch.Tensor]) -> Callable[[BlobRef], torch.Tensor]:
    return lambda blob: vectors[int(blob.digest)]


def naive(
    params: np.ndarray, momentum: np.ndarray, vectors: list[np.ndarray], manifest: Manifest, outer: OuterSpec
) -> tuple[list[np.float32], list[np.float32]]:
    """Value by value in Python, one IEEE operation after the other, each rounded to fp32."""
    f = np.float32
    total = sum(entry.weight for entry in manifest.entries)
    shares = [f(entry.weight * entry.clip / total) for entry in manifest.entries]
    new_params, new_momentum = [], []
    for i in range(len(params)):
        gradient = f(0)
        for share, vector in zip(shares, vectors, strict=True):
            gradient = f(gradient + f(vector[i] * share))
        if outer.optimizer == "average":
            new_params.append(f(params[i] - gradient))
            new_momentum.append(momentum[i])
            continue
        m = f(f(momentum[i] * f(outer.momentum)) + gradient)
        step = f(f(m * f(outer.momentum)) + gradient)
        new_params.append(f(params[i] - f(step * f(outer.lr))))
        new_momentum.append(m)
    return new_params, new_momentum


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.01, 1.0)), min_size=1, max_size=6),
    st.floats(0.0, 0.99),
    st.floats(0.01, 1.5),
    st.sampled_from(["nesterov", "average"]),
    st.integers(0, 2**31),
)
def test_the_outer_step_is_bit_equal_to_a_naive_one(
    size: int, entries: list[tuple[int, float]], momentum: float, lr: float, optimizer: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    params, old = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    vectors = [torch.randn(size, generator=generator) * 0.1 for _ in entries]
    manifest = manifest_of([weight for weight, _ in entries], [clip for _, clip in entries])
    outer = OuterSpec(optimizer=optimizer, lr=lr, momentum=momentum)
    found = apply_manifest(state_of(params, old), manifest, payloads_of(vectors), outer)
    want_params, want_momentum = naive(params.numpy(), old.numpy(), [v.numpy() for v in vectors], manifest, outer)
    assert found.params.numpy().tobytes() == np.array(want_params, np.float32).tobytes()
    assert found.momentum.numpy().tobytes() == np.array(want_momentum, np.float32).tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_digest_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        vectors = [exact_uniform((100_003,), 0.1, f"vector {i}") for i in range(5)]
        state = state_of(exact_uniform((100_003,), 1.0, "state"))
        after = apply_manifest(state, manifest_of([3, 1, 4, 1, 5]), payloads_of(vectors), OuterSpec())
    finally:
        torch.set_num_threads(before)
    assert after.digest() == "56ec2284577da008379df6efe3506e6d0f32e31a734c967cd17ecd44f0d721d4"


def test_an_average_of_one_is_that_one() -> None:
    start, local = torch.randn(500), torch.randn(500)
    state = state_of(start)
    delta = pseudo_gradient(state, local)
    for outer in (OuterSpec(optimizer="average"), OuterSpec(optimizer="nesterov", lr=1.0, momentum=0.0)):
        after = apply_manifest(state, manifest_of([123]), payloads_of([delta]), outer)
        assert torch.allclose(after.params, local, rtol=0, atol=1e-6)


def test_momentum_follows_nesterovs_rule_as_torch_has_it() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    peer = torch.optim.SGD([parameter], lr=0.7, momentum=0.6, nesterov=True)
    state = state_of(torch.tensor([1.0, -2.0]))
    for round in range(5):
        gradient = torch.tensor([0.3, -0.1]) * (round + 1)
        parameter.grad = gradient.clone()
        peer.step()
        state = apply_manifest(
            state, manifest_of([1], round=round), payloads_of([gradient]), OuterSpec(lr=0.7, momentum=0.6)
        )
    assert state.round == 5
    assert torch.allclose(state.params, parameter.detach(), atol=1e-6)


def test_contributions_weigh_by_tokens_and_a_clip_is_not_given_to_the_others() -> None:
    assert coefficients(manifest_of([300, 100])) == [0.75, 0.25]
    assert coefficients(manifest_of([300, 100], [0.5, 1.0])) == [0.375, 0.25]


def test_a_round_without_entries_moves_nothing() -> None:
    state = state_of(torch.ones(3), torch.ones(3))
    after = apply_manifest(state, manifest_of([]), payloads_of([]), OuterSpec())
    assert after.round == 1
    assert torch.equal(after.params, state.params)
    assert torch.equal(after.momentum, state.momentum)


def test_a_state_is_never_changed_in_place() -> None:
    state = state_of(torch.ones(3), torch.ones(3))
    before = state.digest()
    apply_manifest(state, manifest_of([1]), payloads_of([torch.ones(3)]), OuterSpec())
    assert state.digest() == before


def test_a_manifest_of_another_round_and_a_payload_of_another_size_are_refused() -> None:
    state = state_of(torch.ones(3))
    with pytest.raises(StateError):
        apply_manifest(state, manifest_of([1], round=1), payloads_of([torch.ones(3)]), OuterSpec())
    with pytest.raises(PayloadError):
        apply_manifest(state, manifest_of([1]), payloads_of([torch.ones(4)]), OuterSpec())
    with pytest.raises(StateError):
        apply_manifest(state, manifest_of([0]), payloads_of([torch.ones(3)]), OuterSpec())
