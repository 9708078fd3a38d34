"""Models: the built-in GPT, and a user's own `module:function`.

Invariant: the built-in model's initial parameters are the same bits on every machine. They are drawn as integers from a
generator of their own (one per parameter, keyed by the run's seed and the parameter's name) and scaled by one fp32
multiplication; no Gaussian, whose logarithm and cosine differ in the last bit between processors.

The GPT is pre-norm with parameter-free RMSNorm, rotary positions, QK-norm and squared ReLU; output projections start at
zero, so that a block is the identity at first and every learning rate in the optimisers means the same at any depth.
Shape suffixes: B windows, T positions, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_agent.protocol import GptModel, ModuleModel, RunSpec
from worker_agent.trainer.errors import SpecError

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs_BT, targets_BT) -> the mean loss over the targets, in nats, as a scalar tensor."""


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    loss: LossFunction
    context: int
    vocab_size: int


class Linear(nn.Linear):
    """Without a bias, and without torch's own initial values: drawing what is overwritten takes a large model minutes.
    (The meta device would do too, but its first use imports a symbolic algebra system: seconds at every start.)"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.query = Linear(d_model, d_model)
        self.key = Linear(d_model, d_model)
        self.value = Linear(d_model, d_model)
        self.out = Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        shape = (*x_BTD.shape[:2], self.n_head, -1)
        q_BHTK = self.query(x_BTD).view(shape).transpose(1, 2)
        k_BHTK = self.key(x_BTD).view(shape).transpose(1, 2)
        v_BHTK = self.value(x_BTD).view(shape).transpose(1, 2)
        # Under autocast a norm comes out in fp32; attention wants one dtype.
        q_BHTK = rotate(_norm(q_BHTK), cos_TK, sin_TK).to(v_BHTK.dtype)
        k_BHTK = rotate(_norm(k_BHTK), cos_TK, sin_TK).to(v_BHTK.dtype)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).reshape(x_BTD.shape))


class Block(nn.Module):
    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.attention = Attention(d_model, n_head)
        self.up = Linear(d_model, 4 * d_model)
        self.down = Linear(4 * d_model, d_model)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.down(F.relu(self.up(_norm(x_BTD))).square())


class Gpt(nn.Module):
    """Memory is taken here, values are given by `initialise`."""

    def __init__(self, spec: GptModel) -> None:
        super().__init__()
        self.head_width = spec.d_model // spec.n_head
        self.embedding = Embedding(spec.vocab_size, spec.d_model)
        self.blocks = nn.ModuleList(Block(spec.d_model, spec.n_head) for _ in range(spec.n_layer))
        self.head = Linear(spec.d_model, spec.vocab_size)
        if spec.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        cos_TK, sin_TK = self._rotary_for(tokens_BT.shape[1], tokens_BT.device)
        x_BTD = _norm(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return self.head(_norm(x_BTD))

    def _rotary_for(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rotary is None or self._rotary[0].shape[0] < length or self._rotary[0].device != device:
            self._rotary = rotary_table(length, self.head_width, device)
        cos_TK, sin_TK = self._rotary
        return cos_TK[:length], sin_TK[:length]


def rotary_table(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def mean_cross_entropy(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def load_model(run: RunSpec, workdir: Path, artifact: Path | None = None) -> LoadedModel:
    """The run's model on the CPU with the parameters of S_0. `artifact` is the fetched file of a ModuleModel that has
    one."""
    if isinstance(run.model, GptModel):
        return LoadedModel(build_gpt(run.model, run.seed), mean_cross_entropy, run.model.context, run.model.vocab_size)
    return _load_module_model(run.model, run.seed, workdir, artifact)


def build_gpt(spec: GptModel, seed: int) -> Gpt:
    _check_gpt(spec)
    model = Gpt(spec)
    initialise(model, seed)
    return model


def _check_gpt(spec: GptModel) -> None:
    for field in ("n_layer", "n_head", "d_model", "context", "vocab_size"):
        if getattr(spec, field) < 1:
            raise SpecError(f"model.{field}", "must be at least 1")
    if spec.d_model % (2 * spec.n_head):
        raise SpecError("model.d_model", "must be a multiple of twice n_head: each head rotates pairs of values")


def initialise(model: Gpt, seed: int) -> None:
    """Give every parameter its first value. A tied head is the embedding and is drawn once."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            parameter.data.zero_()
        else:
            std = 0.02 if name in ("embedding.weight", "head.weight") else 1 / math.sqrt(parameter.shape[1])
            parameter.data.copy_(exact_uniform(tuple(parameter.shape), std, f"{seed}/{name}"))


def exact_uniform(shape: tuple[int, ...], std: float, key: str) -> Tensor:
    """Uniform values of this standard deviation, the same bits everywhere: 24-bit integers times one constant."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1)
    whole = torch.randint(-(2**23) + 1, 2**23, shape, generator=generator, dtype=torch.int64)
    return whole.to(torch.float32).mul_(std * math.sqrt(3) * 2.0**-23)


# Learners of one process share the path modules are found on and torch's own seed: one loads, then the next.
_ONE_AT_A_TIME = threading.Lock()


def _load_module_model(spec: ModuleModel, seed: int, workdir: Path, artifact: Path | None) -> LoadedModel:
    """Run the user's function. It runs with torch's seed set to the run's, so that a plain nn.Module is the same on
    equal machines; where it is not, the first digests differ and the coordinator says so. Parameters are exchanged,
    buffers are not: running statistics stay each island's own."""
    module_name, separator, function_name = spec.entry.partition(":")
    if not (module_name and separator and function_name):
        raise SpecError("model.entry", "must be `module:function`")
    with _ONE_AT_A_TIME:
        if spec.artifact is not None:
            if artifact is None:
                raise SpecError("model.artifact", "the artifact has not been fetched")
            _make_importable(artifact, module_name, workdir / "modules" / spec.artifact[:16])
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise SpecError("model.entry", f"cannot be imported: {error}") from error
        torch.manual_seed(seed)
        built = function(spec.config)
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and callable(built[1])):
        raise SpecError("model.entry", "must return (torch.nn.Module, loss function)")
    model, loss = built
    return LoadedModel(model.to("cpu", torch.float32), loss, spec.context, spec.vocab_size)


def _make_importable(artifact: Path, module_name: str, folder: Path) -> None:
    """A .zip goes on the path as it is; a single .py is given the name it is imported by. First on the path, so that an
    installed package of the same name does not shadow what the job was submitted with."""
    folder.mkdir(parents=True, exist_ok=True)
    if zipfile.is_zipfile(artifact):
        target = folder / "module.zip"
        entry = str(target)
    else:
        if "." in module_name:
            raise SpecError(
                "model.entry", "a single .py file has no packages: submit a .zip, or name a top-level module"
            )
        target = folder / f"{module_name}.py"
        entry = str(folder)
    shutil.copyfile(artifact, target)
    if entry not in sys.path:
        sys.path.insert(0, entry)
    importlib.invalidate_caches()
