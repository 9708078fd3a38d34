"""Whether the GPUs an agent reports are those its island was registered with, and if not, why, in words.

Pure. Invariant: what the driver states must agree; what its name leaves open (the form factor, often) is not held
against it, but memory that was not read is, because a buyer counts on it. A CPU slot posing as a GPU counts on an
island registered as simulated only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from marketplace.catalog.normalise import LINKS, VRAM_TOLERANCE, link_key, name_key
from worker_agent.protocol import GpuReading, HostFacts

MIB_PER_GIB = 1024
# Words of a driver's name that say nothing of which GPU it is.
_FILLERS = {"tesla", "generation", "edition", "blackwell"}
_MEMORY_WORD = re.compile(r"\d+gb|hbm\d*e?")
# The SXM module is the only H100 with HBM3, and the only one whose driver name has no form factor.
_FORM_BY_MEMORY = {("h100", "hbm3"): "sxm"}
_FORM_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Registered:
    """What an island was registered as."""

    gpu_name: str  # "H100 SXM 80 GB"
    family: str  # "H100"
    form_factor: str
    vram_gib: int | None
    gpu_count: int
    simulated: bool


def misfit(facts: HostFacts, island: Registered) -> str:
    """Why these facts do not fit the island; "" when they do."""
    if not facts.gpus:
        return f"the agent sees no GPU{f': {facts.gpu_note}' if facts.gpu_note else ''}"
    posed = [gpu for gpu in facts.gpus if gpu.simulated]
    if posed and not island.simulated:
        return f"{len(posed)} CPU slots pose as GPUs, and this island is not registered as simulated"
    fitting = posed + [gpu for gpu in facts.gpus if not gpu.simulated and _is(gpu, island)]
    if len(_distinct(fitting)) >= island.gpu_count:
        return ""
    return f"{island.gpu_count} × {island.gpu_name} are registered, the agent sees {seen(facts.gpus)}"


def seen(gpus: Sequence[GpuReading]) -> str:
    """ "8 × NVIDIA H100 80GB HBM3 (79.6 GiB)": what a person compares with the registration."""
    counts = Counter(_described(gpu) for gpu in gpus)
    return ", ".join(f"{count} × {words}" for words, count in counts.items()) or "none"


def driver_gpu(name: str) -> tuple[str, str | None]:
    """The family and form factor in a driver's name: "NVIDIA A100-SXM4-80GB" is ("a100", "sxm"), "NVIDIA L40S" is
    ("l40s", None)."""
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _FILLERS]
    forms = [link_key(word) for word in words if word in LINKS]
    memory = [word for word in words if _MEMORY_WORD.fullmatch(word)]
    family = name_key(" ".join(word for word in words if word not in LINKS and word not in memory))
    by_memory = next((_FORM_BY_MEMORY[family, word] for word in memory if (family, word) in _FORM_BY_MEMORY), None)
    return family, forms[0] if forms else by_memory


def _is(gpu: GpuReading, island: Registered) -> bool:
    family, form = driver_gpu(gpu.name)
    if family != name_key(island.family):
        return False
    if form is not None and _FORM_UNKNOWN not in (form, island.form_factor) and form != island.form_factor:
        return False
    if island.vram_gib is None:
        return True
    if gpu.vram_mib is None:
        return False
    return abs(Decimal(gpu.vram_mib) / MIB_PER_GIB - island.vram_gib) <= island.vram_gib * VRAM_TOLERANCE


def _distinct(gpus: Sequence[GpuReading]) -> set[str | int]:
    """One GPU read twice is one GPU."""
    return {gpu.uuid or gpu.index for gpu in gpus}


def _described(gpu: GpuReading) -> str:
    memory = "memory not read" if gpu.vram_mib is None else f"{gpu.vram_mib / MIB_PER_GIB:.1f} GiB"
    name = "".join(character if character.isprintable() else " " for character in gpu.name)[:80]
    return f"{name} (simulated)" if gpu.simulated else f"{name} ({memory})"
