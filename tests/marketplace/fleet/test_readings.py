"""Which GPUs a driver's words may pass for."""

from __future__ import annotations

import pytest

from marketplace.fleet.readings import Registered, driver_gpu, misfit, seen
from tests.marketplace.fleet.build import H100, facts
from worker_agent.protocol import GpuReading, HostFacts

REGISTERED = Registered(
    gpu_name="H100 SXM 80 GB", family="H100", form_factor="sxm", vram_gib=80, gpu_count=4, simulated=False
)


@pytest.mark.parametrize(
    ("name", "family", "form"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "sxm"),
        ("NVIDIA H100 PCIe", "h100", "pcie"),
        ("NVIDIA H100 NVL", "h100", "nvl"),
        ("NVIDIA H200", "h200", None),
        ("NVIDIA A100-SXM4-80GB", "a100", "sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100", "pcie"),
        ("NVIDIA A100 80GB PCIe", "a100", "pcie"),
        ("NVIDIA GH200 480GB", "gh200", None),
        ("Tesla V100-SXM2-32GB", "v100", "sxm"),
        ("NVIDIA L40S", "l40s", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090", None),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000server", None),
        ("NVIDIA B200", "b200", None),
    ],
)
def test_a_drivers_name_says_family_and_sometimes_form(name: str, family: str, form: str | None) -> None:
    assert driver_gpu(name) == (family, form)


def with_(**changes: object) -> Registered:
    return Registered(**{**REGISTERED.__dict__, **changes})  # type: ignore[arg-type]  # a test's own keys


def test_the_gpus_registered_fit_and_more_of_them_do_too() -> None:
    assert misfit(facts(4, simulated=False), REGISTERED) == ""
    assert misfit(facts(8, simulated=False), REGISTERED) == ""


def test_too_few_are_counted_in_words() -> None:
    words = misfit(facts(3, simulated=False), REGISTERED)
    assert words == "4 × H100 SXM 80 GB are registered, the agent sees 3 × NVIDIA H100 80GB HBM3 (79.6 GiB)"


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA L40S", ""])
def test_another_gpu_does_not_pass_for_the_one_registered(name: str) -> None:
    assert misfit(facts(4, simulated=False, name=name), REGISTERED)


@pytest.mark.parametrize("vram_mib", [40_960, 95_830, None])
def test_other_memory_or_memory_not_read_does_not_fit(vram_mib: int | None) -> None:
    assert misfit(facts(4, simulated=False, vram_mib=vram_mib), REGISTERED)


def test_what_was_registered_without_form_or_memory_takes_any() -> None:
    loose = with_(form_factor="unknown", vram_gib=None)
    assert misfit(facts(4, simulated=False, name="NVIDIA H100 PCIe", vram_mib=None), loose) == ""


def test_posed_gpus_fit_only_an_island_registered_as_simulated() -> None:
    assert "not registered as simulated" in misfit(facts(4), REGISTERED)
    assert misfit(facts(4), with_(simulated=True)) == ""
    assert misfit(facts(3), with_(simulated=True)).endswith("3 × Simulated GPU (simulated)")


def test_one_gpu_read_four_times_is_one_gpu() -> None:
    twin = GpuReading(index=0, name=H100, uuid="GPU-same", vram_mib=81_559)
    reported = facts(0, simulated=False)
    reported.gpus = [twin] * 4
    assert misfit(reported, REGISTERED)


def test_no_gpu_at_all_is_told_with_the_agents_own_reason() -> None:
    bare = HostFacts(
        hostname="h", agent_version="1", python_version="3", platform="p", gpus=[], gpu_note="no driver on this machine"
    )
    assert misfit(bare, REGISTERED) == "the agent sees no GPU: no driver on this machine"


def test_a_name_with_control_characters_is_shown_without_them() -> None:
    assert seen([GpuReading(index=0, name="H100\x1b[31m\n", vram_mib=1024)]) == "1 × H100 [31m  (1.0 GiB)"
