"""Inner optimisers: Muon for hidden matrices with AdamW for the rest, or AdamW for all; schedules by global tokens.

Invariant: the learning rate is a function of the run's specification and of the global count of tokens only, never of a
member's own steps, so that a run follows one schedule whatever its roster.

Written out rather than taken from torch.optim for two reasons that show in use: matrices of one shape are
orthogonalised in one batched product (a small model spends most of a step in launches otherwise), and torch.optim
pulls in the compiler's front end at the first step, which costs a member seconds at every start. The tests hold both
against torch's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from worker_agent.protocol import InnerSpec
from worker_agent.trainer.errors import SpecError

_WSD_DECAY_SHARE = 0.2  # of the budget: the length of the final fall of warm-up, stable, decay


def schedule_factor(inner: InnerSpec, *, tokens_total: int, position: int) -> float:
    """The share of the learning rate in force once `position` tokens of the whole run have been trained on."""
    position = min(max(position, 0), tokens_total)
    warmup = min(1.0, (position + 1) / inner.warmup_tokens) if inner.warmup_tokens > 0 else 1.0
    final = inner.final_lr_fraction
    if inner.schedule == "cosine":
        decay = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * position / tokens_total))
    elif inner.schedule == "wsd":
        left = (tokens_total - position) / (_WSD_DECAY_SHARE * tokens_total)
        decay = final + (1 - final) * min(1.0, left)
    else:
        decay = 1.0
    return warmup * decay


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz with the quintic's usual coefficients: singular values of each matrix go to about one.

    `matrices` is (n, rows, columns) with rows <= columns. bf16 on an accelerator, where it is exact enough and twice as
    fast; fp32 on a CPU, where bf16 is emulated."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.to(matrices.dtype)


class Muon:
    """Momentum, orthogonalised. The update of a matrix is scaled by sqrt(max(1, rows / columns)), so that one learning
    rate serves all shapes."""

    def __init__(self, parameters: Iterable[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        shapes: defaultdict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            shapes[min(parameter.shape), max(parameter.shape)].append(parameter)
        self._groups = list(shapes.values())
        self._buffers = [
            torch.zeros((len(group), *sorted(group[0].shape)), device=group[0].device, dtype=group[0].dtype)
            for group in self._groups
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            gradient = torch.stack([_wide(_gradient_of(parameter)) for parameter in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp_(buffer, self.momentum))
            for parameter, direction in zip(group, update, strict=True):
                rows, columns = parameter.shape
                if self.weight_decay:
                    parameter.mul_(1 - lr * self.weight_decay)
                parameter.add_(_like(direction, parameter), alpha=-lr * max(1.0, rows / columns) ** 0.5)


class AdamW:
    """Adam with decoupled weight decay, by the textbook; vectors (norms, biases) are not decayed."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps = 0
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        size = lr / (1 - beta1**self.steps)
        correction = math.sqrt(1 - beta2**self.steps)
        for parameter, first, second in zip(self.parameters, self._first, self._second, strict=True):
            gradient = _gradient_of(parameter)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if self.weight_decay and parameter.dim() > 1:
                parameter.mul_(1 - lr * self.weight_decay)
            parameter.addcdiv_(first, second.sqrt().div_(correction).add_(self.eps), value=-size)


class InnerOptimizer:
    """What a run's InnerSpec names, over one model. Its state is the member's own: kept from round to round, never
    sent."""

    def __init__(self, model: nn.Module, inner: InnerSpec, *, tokens_total: int) -> None:
        if inner.lr <= 0 or inner.adamw_lr <= 0:
            raise SpecError("inner.lr", "must be above zero")
        self.inner = inner
        self.tokens_total = tokens_total
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._muon: Muon | None = None
        rest, self._rest_lr = self.parameters, inner.lr
        if inner.optimizer == "muon":
            hidden = hidden_matrices(model)
            names = {id(parameter) for parameter in hidden}
            rest, self._rest_lr = [p for p in self.parameters if id(p) not in names], inner.adamw_lr
            self._muon = Muon(hidden, weight_decay=inner.weight_decay)
        self._adamw = AdamW(rest, weight_decay=inner.weight_decay)

    def step(self, position: int) -> bool:
        """Clip and step. False: the gradient was not finite and nothing was changed, as if the batch had not been
        read."""
        total = global_norm(self.parameters)
        if not math.isfinite(total):
            return False
        if 0 < self.inner.grad_clip < total:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.inner.grad_clip / (total + 1e-6))
        factor = schedule_factor(self.inner, tokens_total=self.tokens_total, position=position)
        if self._muon is not None:
            self._muon.step(self.inner.lr * factor)
        self._adamw.step(self._rest_lr * factor)
        return True


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Two-dimensional parameters which are neither an embedding nor the output head: the head is the last Linear whose
    rows are as many as an embedding's, in our model as in nearly all language models."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = {weight.shape[0] for weight in embeddings}
    outside = {id(weight) for weight in embeddings}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linears and (linears[-1].weight.shape[0] in vocabularies or not vocabularies):
        outside.add(id(linears[-1].weight))
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outside]


def global_norm(parameters: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _gradient_of(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _like(update: Tensor, parameter: Tensor) -> Tensor:
    return update if update.shape == parameter.shape else update.mT
