from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.worker_agent.control_plane import running_control_plane
from worker_agent import cli, hardware
from worker_agent.doctor import Finding, examine
from worker_agent.protocol import GpuReading
from worker_agent.state import Home
from worker_agent.telemetry import pci_pair


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in findings}


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert "exit codes:" in capsys.readouterr().out


def test_a_home_not_enrolled_has_its_own_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--home", str(tmp_path / "none")]) == 9
    assert "enroll" in capsys.readouterr().err
    assert cli.main(["status", "--json", "--home", str(tmp_path / "none")]) == 9
    assert json.loads(capsys.readouterr().out)["error"] == "NotEnrolled"


def test_enroll_then_status_then_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(tmp_path / "home")
    with running_control_plane() as (plane, url):
        asked = ["enroll", "--server", f"{url}/", "--token", "join-1", "--home", home, "--simulate-gpus", "2", "--json"]
        assert cli.main(asked) == 0
        assert json.loads(capsys.readouterr().out)["epoch"] == 1
        assert cli.main(["status", "--home", home, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["agent_id"], told["server_url"], told["running_pid"]) == ("agt_1", url, None)
        before = len(plane.syncs)
        seen = states(examine(Home(home)))
        assert (seen["home"], seen["dns"], seen["tcp"], seen["http"], seen["credential"]) == ("ok",) * 5
        assert len(plane.syncs) == before, "doctor is not taken for a beat of the agent"
        plane.revoked = True
        assert states(examine(Home(home)))["credential"] == "problem"
    assert states(examine(Home(home)))["tcp"] == "problem"


def test_doctor_sends_the_credential_to_no_other_address(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    with running_control_plane() as (_, url), running_control_plane() as (other, elsewhere):
        assert cli.main(["enroll", "--server", url, "--token", "join-1", "--home", home]) == 0
        examine(Home(home), server=elsewhere)
        assert other.seen_credentials == [""]


def test_doctor_sees_an_open_home(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    assert states(examine(Home(tmp_path / "home")))["home"] == "problem"


def test_simulated_gpus_say_that_they_are(tmp_path: Path) -> None:
    facts = hardware.read_facts(tmp_path, hardware.Simulation(3, "H100"))
    assert facts.gpu_source == "simulated"
    assert [(gpu.name, gpu.simulated, gpu.vram_mib) for gpu in facts.gpus] == [("H100", True, None)] * 3


def test_an_absence_of_gpus_is_stated_in_words(tmp_path: Path) -> None:
    facts = hardware.read_facts(tmp_path, gpus=lambda: ([], "no driver"))
    assert (facts.gpu_source, facts.gpu_note, facts.gpus) == ("absent", "no driver", [])


def test_load_and_temperature_are_no_change_of_facts_but_a_lost_gpu_is(tmp_path: Path) -> None:
    cool = hardware.read_facts(tmp_path, gpus=lambda: ([GpuReading(index=0, name="H200", temperature_c=30)], ""))
    warm = hardware.read_facts(tmp_path, gpus=lambda: ([GpuReading(index=0, name="H200", temperature_c=70)], ""))
    none = hardware.read_facts(tmp_path, gpus=lambda: ([], ""))
    assert not hardware.changed(cool, warm)
    assert hardware.changed(cool, none)
    assert hardware.changed(None, cool)


def test_nvmls_packed_pci_id_is_vendor_then_device() -> None:
    assert pci_pair(0x233010DE) == "10de:2330"
