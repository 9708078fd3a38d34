"""The outer state of a run, S_r: parameters and outer momentum as flat fp32 vectors, its digest and its file.

Invariant: equal digests mean bit-equal states. The digest is the SHA-256 of the layout digest (ASCII), the parameters
and the momentum (both little-endian fp32); it does not depend on how or by whom the file was written.

The file is plain safetensors: every parameter under its own name and shape, the momentum under
`outer.momentum/<name>`, so that `safetensors.torch.load_file` and a filter on that prefix give a state_dict with
nothing of ours installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from worker_agent.trainer.errors import StateError
from worker_agent.trainer.layout import Layout

MOMENTUM_PREFIX = "outer.momentum/"
_METADATA_KEY = "archipelago"  # a single key: the order of several is not fixed, and equal states should be equal files


@dataclass(frozen=True)
class OuterState:
    """S_round. The tensors are never changed in place once a state exists: a failed apply leaves the old one whole."""

    round: int
    layout: Layout
    params: Tensor
    momentum: Tensor

    @classmethod
    def initial(cls, layout: Layout, params: Tensor) -> OuterState:
        return cls(round=0, layout=layout, params=params, momentum=torch.zeros_like(params))

    def digest(self) -> str:
        return state_digest(self.layout, self.params, self.momentum)


def state_digest(layout: Layout, params: Tensor, momentum: Tensor) -> str:
    hasher = hashlib.sha256(layout.digest.encode("ascii"))
    hasher.update(little_endian_bytes(params))
    hasher.update(little_endian_bytes(momentum))
    return hasher.hexdigest()


def little_endian_bytes(flat: Tensor) -> memoryview:
    """The vector's bytes without a copy where the machine is little-endian, which all that torch supports well are."""
    array: np.ndarray = flat.detach().contiguous().numpy()
    if sys.byteorder == "big":
        array = array.astype("<f4")
    return array.data.cast("B")


def save_snapshot(state: OuterState, path: Path, *, job_id: str) -> None:
    """Write S_r so that a reader sees the whole file or none: temporary name, fsync, rename, fsync of the folder."""
    tensors = dict(state.layout.views(state.params))
    tensors |= {MOMENTUM_PREFIX + name: view for name, view in state.layout.views(state.momentum)}
    about = {
        "format": 1,
        "job_id": job_id,
        "round": state.round,
        "state_digest": state.digest(),
        "layout": state.layout.json,
    }
    temporary = _temporary(path)
    save_file(tensors, str(temporary), metadata={_METADATA_KEY: json.dumps(about, sort_keys=True)})
    _put_in_place(temporary, path)


def load_snapshot(path: Path) -> OuterState:
    """Read S_r and prove it: the digest in the file is recomputed from the tensors."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
            if not isinstance(about, dict) or about.get("format") != 1:
                raise StateError("the file is no snapshot of a run")
            layout = Layout.from_json(about["layout"])
            params = layout.flatten({name: file.get_tensor(name) for name, _ in layout.entries})
            momentum = layout.flatten({name: file.get_tensor(MOMENTUM_PREFIX + name) for name, _ in layout.entries})
            state = OuterState(round=int(about["round"]), layout=layout, params=params, momentum=momentum)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"the snapshot cannot be read: {error}") from error
    if state.digest() != about.get("state_digest"):
        raise StateError("the snapshot's tensors do not match the digest written with them")
    return state


def write_atomically(path: Path, data: bytes) -> None:
    temporary = _temporary(path)
    temporary.write_bytes(data)
    _put_in_place(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _put_in_place(temporary: Path, path: Path) -> None:
    """The name appears only once the bytes are on the disk, and is itself on the disk when this returns."""
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
