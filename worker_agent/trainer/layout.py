"""The order in which a model's parameters lie in one flat fp32 vector.

Invariant: two members agree on every position of the vector if and only if their layout digests are equal. The digest
is the SHA-256 of the compact JSON [[name, [shape...]], ...] in named_parameters() order, as the protocol says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from worker_agent.trainer.errors import StateError


@dataclass(frozen=True)
class Layout:
    """Names and shapes, in order."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """A tied parameter has one name and one place: named_parameters() gives each tensor once."""
        return cls(tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        try:
            return cls(tuple((str(name), tuple(int(size) for size in shape)) for name, shape in json.loads(text)))
        except (ValueError, TypeError) as error:
            raise StateError(f"not a parameter layout: {error}") from error

    @cached_property
    def json(self) -> str:
        return json.dumps(
            [[name, list(shape)] for name, shape in self.entries], separators=(",", ":"), ensure_ascii=False
        )

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def numel(self) -> int:
        return sum(prod(shape) for _, shape in self.entries)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of `flat`, in its shape; views, not copies."""
        if flat.numel() != self.numel:
            raise StateError(f"a vector of {flat.numel()} values does not fit a layout of {self.numel}")
        offset = 0
        for name, shape in self.entries:
            size = prod(shape)
            yield name, flat[offset : offset + size].view(shape)
            offset += size

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors into a new flat fp32 vector on the CPU; a missing name or another shape is an error."""
        flat = torch.empty(self.numel, dtype=torch.float32)
        for name, view in self.views(flat):
            tensor = tensors.get(name)
            if tensor is None:
                raise StateError(f"parameter {name} is missing")
            if tensor.shape != view.shape:
                raise StateError(
                    f"parameter {name} has shape {tuple(tensor.shape)}, the layout has {tuple(view.shape)}"
                )
            view.copy_(tensor.detach())
        return flat

    def flatten_model(self, model: nn.Module) -> Tensor:
        return self.flatten({name: parameter.data for name, parameter in model.named_parameters()})

    @torch.no_grad()
    def load_into(self, model: nn.Module, flat: Tensor) -> None:
        """Copy the vector into the model's parameters, whatever their device or dtype."""
        parameters = dict(model.named_parameters())
        for name, view in self.views(flat):
            parameters[name].copy_(view)
