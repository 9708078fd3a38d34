"""The text of a run as bytes: where it comes from, what is held out, and how windows are cut from it.

Invariant: the held-out bytes are the last `heldout_bytes`, and no training window touches them.

The built-in text is the Python sources of the running interpreter's standard library: real English (docstrings,
comments) and real code, megabytes of it, on any machine that can run the trainer, with no download and no licence
question. Parts which distributors split off, generate or leave out are not read, and files come in the order of their
hashed paths, so that machines with the same Python version read the same bytes and the held-out end is a sample of
the whole, not the letter z.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from torch import Tensor

from worker_agent.protocol import BlobData, BuiltinData, DataSpec, FilesData, RunSpec, UrlData
from worker_agent.trainer.errors import BlobMissing, SpecError
from worker_agent.trainer.shards import Indices
from worker_agent.trainer.state import write_atomically

# Packaged separately by some distributors, generated per machine, or tables rather than text.
_SKIPPED_PARTS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo"}
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-", "__phello__", "turtle")


@dataclass(frozen=True)
class Corpus:
    """The bytes, split. `train` and `heldout` are uint8 vectors on the CPU, memory-mapped where they come from a
    file."""

    train: Tensor
    heldout: Tensor
    context: int

    @classmethod
    def split(cls, text: Tensor, *, heldout_bytes: int, context: int) -> Corpus:
        if heldout_bytes < context + 1:
            raise SpecError("heldout_bytes", f"must hold at least one window of {context + 1} bytes")
        if text.numel() < heldout_bytes + context + 1:
            raise SpecError("data", f"{text.numel()} bytes are too few beside {heldout_bytes} held out")
        cut = text.numel() - heldout_bytes
        return cls(train=text[:cut], heldout=text[cut:], context=context)

    @property
    def windows(self) -> int:
        """Windows of context inputs; each also reads the byte after its last input, as a target."""
        return (self.train.numel() - 1) // self.context

    def batch(self, windows: Indices) -> tuple[Tensor, Tensor]:
        return _cut(self.train, torch.from_numpy(windows) * self.context, self.context)

    def heldout_batches(self, limit_bytes: int, windows_per_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out bytes in order, each predicted once from the bytes before it in its own window."""
        targets = min(limit_bytes, self.heldout.numel() - 1)
        starts = torch.arange(max(1, targets // self.context)) * self.context
        for part in starts.split(windows_per_batch):
            yield _cut(self.heldout, part, self.context)


def _cut(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    cut_BT = text[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return cut_BT[:, :-1].contiguous(), cut_BT[:, 1:].contiguous()


def load_corpus(run: RunSpec, workdir: Path, context: int, artifact: Path | None = None) -> Corpus:
    """`artifact` is the fetched file of BlobData. The path of a URL's file is kept in `workdir`, so that a restart
    reads it."""
    return Corpus.split(load_text(run.data, workdir, artifact), heldout_bytes=run.heldout_bytes, context=context)


def load_text(data: DataSpec, workdir: Path, artifact: Path | None = None) -> Tensor:
    if isinstance(data, BuiltinData):
        return _as_vector(python_stdlib_text(data.max_bytes))
    if isinstance(data, BlobData):
        if artifact is None:
            raise SpecError("data.digest", "the artifact has not been fetched")
        return _mapped(artifact)
    if isinstance(data, UrlData):
        return _mapped(download(data.url, data.sha256, workdir / "data"))
    return _files(data)


def python_stdlib_text(max_bytes: int, root: Path | None = None) -> bytes:
    root = root or Path(sysconfig.get_paths()["stdlib"])
    chosen = sorted(_stdlib_sources(root), key=lambda path: hashlib.sha256(path.encode()).digest())
    parts, size = [], 0
    for relative in chosen:
        if size >= max_bytes:
            break
        part = (root / relative).read_bytes().replace(b"\r\n", b"\n")
        parts.append(part)
        size += len(part)
    return b"".join(parts)[:max_bytes]


def _stdlib_sources(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_PARTS.isdisjoint(relative.parts) and not any(
            part.startswith(_SKIPPED_PREFIXES) for part in relative.parts
        ):
            yield relative.as_posix()


def download(url: str, sha256: str, folder: Path) -> Path:
    """Fetch once, by digest: a file already there with that name has been checked when it was written."""
    target = folder / sha256
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    body = bytearray()
    hasher = hashlib.sha256()
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                body += chunk
                hasher.update(chunk)
    except httpx.HTTPError as error:
        raise BlobMissing(f"the data at {url} cannot be fetched: {error}") from error
    if hasher.hexdigest() != sha256:
        raise BlobMissing(f"the data at {url} has SHA-256 {hasher.hexdigest()}, the run asks for {sha256}")
    write_atomically(target, bytes(body))
    return target


def _files(data: FilesData) -> Tensor:
    path = Path(data.path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return _as_vector(b"".join(file.read_bytes() for file in files))
    if not path.is_file():
        raise SpecError("data.path", f"{path} is not there on this island")
    return _mapped(path)


def _as_vector(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _mapped(path: Path) -> Tensor:
    """Copy-on-write: torch wants memory it may write to, and the file stays as it is."""
    if path.stat().st_size == 0:
        raise SpecError("data", f"{path} is empty")
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
