from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marketplace.devstack.state import POSTGRES_PORT, StateDir


def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        values = set(pool.map(lambda _: state.secret("key"), range(16)))
    assert len(values) == 1
    assert stat.S_IMODE((tmp_path / "secrets" / "key").stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "secrets").iterdir()] == ["key"]


def test_processes_find_the_servers_where_the_last_stack_put_them(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert f":{POSTGRES_PORT}/" in state.database_url()
    state.write_ports({"postgres": 5001, "valkey": 6001})
    assert ":5001/" in state.database_url()
    assert ":6001/" in state.broker_url()


def test_a_damaged_port_file_means_the_default_ports(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{")
    assert StateDir(tmp_path).port("postgres", 1234) == 1234
