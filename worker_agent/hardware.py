"""What this machine is: the facts the agent sends at its first beat, and again when they change.

Invariant: nothing is guessed. What cannot be read is None, and `gpu_note` says in words why there is no GPU reading.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from worker_agent.protocol import GpuReading, HostFacts
from worker_agent.telemetry import read_gpus

_MIB = 1024 * 1024
_STEADY = ("index", "name", "uuid", "pci_device_id", "vram_mib", "simulated")


@dataclass(frozen=True)
class Simulation:
    """CPU slots posing as GPUs, for demonstrations and tests: every reading of them says so."""

    gpus: int
    gpu_name: str = "Simulated GPU"


def agent_version() -> str:
    return _installed_version("archipelago-agent") or "0.0.0+source"


def read_facts(
    home: Path,
    simulation: Simulation | None = None,
    gpus: Callable[[], tuple[list[GpuReading], str]] = read_gpus,
) -> HostFacts:
    readings: list[GpuReading]
    if simulation is not None:
        readings = [GpuReading(index=i, name=simulation.gpu_name, simulated=True) for i in range(simulation.gpus)]
        source, note = "simulated", "CPU slots posing as GPUs, as the operator asked"
    else:
        readings, note = gpus()
        source = "nvml" if readings else "absent"
    return HostFacts(
        hostname=socket.gethostname(),
        agent_version=agent_version(),
        python_version=platform.python_version(),
        platform=platform.platform(),
        gpus=readings,
        gpu_source=source,  # type: ignore[arg-type]  # one of the three literals above
        gpu_note=note,
        cpu_count=os.cpu_count(),
        ram_mib=_ram_mib(),
        disk_free_mib=disk_free_mib(home),
        torch_version=_installed_version("torch"),
    )


def changed(before: HostFacts | None, now: HostFacts) -> bool:
    """Whether the server should hear it: what moves all the time (disk, load, temperature) is no change."""
    return before is None or _steady(before) != _steady(now)


def disk_free_mib(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free // _MIB
    except OSError:
        return None


def _steady(facts: HostFacts) -> tuple[HostFacts, list[tuple[object, ...]]]:
    gpus = [tuple(getattr(gpu, name) for name in _STEADY) for gpu in facts.gpus]
    return msgspec.structs.replace(facts, gpus=[], disk_free_mib=None), gpus


def _installed_version(distribution: str) -> str | None:
    """By its metadata: importing torch only to ask would cost seconds and memory."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _ram_mib() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
    except (OSError, ValueError):
        return None
