"""The outer step: a sealed manifest turns S_r into S_{r+1}, by the same arithmetic on every member.

Invariant: bit-equal results everywhere. So: fp32 on the CPU, entries in manifest order, one multiplication and one
addition at a time as separate element-wise operations (no alpha arguments, which may be contracted to one rounding;
no dot products or BLAS, whose order of summation is the machine's own). Coefficients are computed once, in double,
and rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker_agent.protocol import BlobRef, Manifest, OuterSpec
from worker_agent.trainer.errors import PayloadError, StateError
from worker_agent.trainer.state import OuterState

Payloads = Callable[[BlobRef], Tensor]


def pseudo_gradient(state: OuterState, local: Tensor) -> Tensor:
    """S_r minus the member's parameters: the direction that, subtracted from S_r, leads to where the member went."""
    return torch.sub(state.params, local)


def coefficients(manifest: Manifest) -> list[float]:
    """weight * clip / sum(weight), in manifest order. A clip shrinks an entry; it does not give its weight to the
    others."""
    total = sum(entry.weight for entry in manifest.entries)
    if manifest.entries and total <= 0:
        raise StateError("the manifest's entries weigh nothing")
    return [entry.weight * entry.clip / total for entry in manifest.entries]


def merge(manifest: Manifest, payloads: Payloads, numel: int) -> Tensor:
    """The round's pseudo-gradient. Payloads are asked for one at a time, so that a large model needs two vectors, not
    M."""
    total = torch.zeros(numel, dtype=torch.float32)
    for entry, coefficient in zip(manifest.entries, coefficients(manifest), strict=True):
        vector = payloads(entry.blob)
        if vector.shape != total.shape or vector.dtype != torch.float32:
            raise PayloadError("shape", f"{vector.numel()} values where the state has {numel}")
        total.add_(torch.mul(vector, coefficient))
    return total


def apply_manifest(state: OuterState, manifest: Manifest, payloads: Payloads, outer: OuterSpec) -> OuterState:
    """S_{r+1}. With one entry of clip 1 the mean is that entry, and `average` then lands where that member went."""
    if manifest.round != state.round:
        raise StateError(f"manifest {manifest.round} cannot be applied to the state of round {state.round}")
    gradient = merge(manifest, payloads, state.params.numel())
    if not manifest.entries:  # nothing was learnt: coasting on momentum alone would move the model with no evidence
        params, momentum = state.params, state.momentum
    elif outer.optimizer == "average":
        params, momentum = torch.sub(state.params, gradient), state.momentum
    else:
        momentum = torch.mul(state.momentum, outer.momentum).add_(gradient)
        step = torch.mul(momentum, outer.momentum).add_(gradient)
        params = torch.sub(state.params, torch.mul(step, outer.lr))
    return OuterState(round=state.round + 1, layout=state.layout, params=params, momentum=momentum)
