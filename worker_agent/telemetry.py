"""GPU readings from NVML, the driver's own library, by ctypes: no package to install, and a stated absence without it.

Invariant: a reading the driver does not give is None, never zero; no call here can hang the agent's loop for long or
raise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from worker_agent.protocol import GpuReading

_LIBRARY = "libnvidia-ml.so.1"
_MIB = 1024 * 1024


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


def read_gpus() -> tuple[list[GpuReading], str]:
    """The GPUs, and a note in words: empty if all went well."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return [], f"{_LIBRARY} is not on this machine: no NVIDIA driver, or not visible in this container"
    code = nvml.nvmlInit_v2()
    if code != 0:
        return [], f"the NVIDIA driver did not answer (NVML error {code}): is the kernel module of the same version?"
    try:
        count = ctypes.c_uint()
        code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if code != 0:
            return [], f"the NVIDIA driver did not count its GPUs (NVML error {code})"
        readings, lost = [], []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            if code != 0:
                lost.append(f"GPU {index} does not answer (NVML error {code})")
                continue
            readings.append(_read_gpu(nvml, index, handle))
        if not readings and not lost:
            return [], "the NVIDIA driver is there and sees no GPU"
        return readings, "; ".join(lost)
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, handle: ctypes.c_void_p) -> GpuReading:
    memory, utilisation, pci = _Memory(), _Utilisation(), _Pci()
    power, temperature = ctypes.c_uint(), ctypes.c_uint()
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    has_utilisation = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilisation)) == 0
    has_pci = nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)) == 0
    has_power = nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0
    has_temperature = nvml.nvmlDeviceGetTemperature(handle, ctypes.c_uint(0), ctypes.byref(temperature)) == 0
    return GpuReading(
        index=index,
        name=_text(nvml.nvmlDeviceGetName, handle) or "unknown NVIDIA GPU",
        uuid=_text(nvml.nvmlDeviceGetUUID, handle),
        pci_device_id=pci_pair(pci.pci_device_id) if has_pci else None,
        vram_mib=memory.total // _MIB if has_memory else None,
        utilisation_pct=utilisation.gpu if has_utilisation else None,
        power_w=power.value // 1000 if has_power else None,
        temperature_c=temperature.value if has_temperature else None,
    )


def pci_pair(combined: int) -> str:
    """NVML packs device and vendor into one number: 0x233010de is "10de:2330"."""
    return f"{combined & 0xFFFF:04x}:{combined >> 16:04x}"


def _text(call: Callable[..., int], handle: ctypes.c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    if call(handle, buffer, ctypes.c_uint(len(buffer))) != 0:
        return None
    return buffer.value.decode("utf-8", "replace")
