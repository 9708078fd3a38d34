"""From a run specification to an island ready to train: fetch what it names, build the model, read the text.

Invariant: all processes of an island build from the same specification and the same files; only rank 0 fetches.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from worker_agent.protocol import BlobData, ModuleModel, RunSpec
from worker_agent.trainer.data import load_corpus
from worker_agent.trainer.distributed import Group
from worker_agent.trainer.errors import SpecError
from worker_agent.trainer.exchange import Exchange
from worker_agent.trainer.inner import ComputeOptions, Island
from worker_agent.trainer.model import load_model

_BYTE_VALUES = 256


class _Parts(msgspec.Struct, omit_defaults=True):
    """What rank 0 announces: the specification, and where on this machine its files lie."""

    run: RunSpec
    model_path: str | None = None
    data_path: str | None = None


def assemble(run: RunSpec, exchange: Exchange, workdir: Path, group: Group, options: ComputeOptions) -> Island:
    """On rank 0."""
    _check(run)
    parts = _Parts(run)
    wanted: list[str] = []
    if isinstance(run.model, ModuleModel) and run.model.artifact is not None:
        wanted.append(run.model.artifact)
    if isinstance(run.data, BlobData):
        wanted.append(run.data.digest)
    paths = exchange.get_blobs(wanted, workdir / "artifacts") if wanted else {}
    if isinstance(run.model, ModuleModel) and run.model.artifact is not None:
        parts.model_path = str(paths[run.model.artifact])
    if isinstance(run.data, BlobData):
        parts.data_path = str(paths[run.data.digest])
    group.announce(msgspec.json.encode(parts))
    return _build(parts, workdir, group, options)


def assemble_follower(workdir: Path, group: Group, options: ComputeOptions) -> Island:
    """On the other ranks: wait for rank 0's word."""
    return _build(msgspec.json.decode(group.announce(), type=_Parts), workdir, group, options)


def _build(parts: _Parts, workdir: Path, group: Group, options: ComputeOptions) -> Island:
    run = parts.run
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    folder = workdir if group.is_lead else workdir / f"rank-{group.rank}"  # each rank lays out modules for itself
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_model(run, folder, Path(parts.model_path) if parts.model_path else None)
    if loaded.vocab_size < _BYTE_VALUES:
        raise SpecError("model.vocab_size", f"must be at least {_BYTE_VALUES}: the text is read as bytes")
    corpus = load_corpus(run, folder, loaded.context, Path(parts.data_path) if parts.data_path else None)
    return Island(run, loaded, corpus, group=group, options=options)


def _check(run: RunSpec) -> None:
    if run.tokens < 1:
        raise SpecError("tokens", "must be at least 1")
    if run.threads is not None and run.threads < 1:
        raise SpecError("threads", "must be at least 1")
    if not 0 <= run.outer.momentum < 1:
        raise SpecError("outer.momentum", "must be in [0, 1)")
