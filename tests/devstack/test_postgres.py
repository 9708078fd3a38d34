from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from marketplace.devstack.ports import free_port
from marketplace.devstack.postgres import STOP_SIGNAL, Account, Postgres, PostgresError, home
from marketplace.devstack.spawn import end, spawn
from tests.servers import reachable_folder, running_postgres, wait_until


@pytest.fixture
def server() -> Iterator[Postgres]:
    with reachable_folder() as folder:
        server = Postgres(folder / "postgres", free_port(), "secret", fragile=True)
        server.prepare()
        yield server


def test_the_embedded_database_starts_and_answers() -> None:
    with running_postgres() as server, psycopg.connect(server.url("postgres")) as connection:
        row = connection.execute("SELECT current_setting('server_version_num')::int").fetchone()
    assert row is not None
    assert row[0] >= 180000


def test_a_pid_file_that_names_somebody_else_is_no_server(server: Postgres) -> None:
    """After a reboot the number in the file is any process's; here it is ours, which must survive."""
    file = server.directory / "postmaster.pid"
    file.write_text(f"{os.getpid()}\n{server.directory}\n")
    server.prepare()
    assert not file.exists()


def test_an_empty_pid_file_is_no_server(server: Postgres) -> None:
    file = server.directory / "postmaster.pid"
    file.write_text("")
    server.prepare()
    assert not file.exists()


def test_a_server_left_running_on_our_data_is_ended_before_the_next_starts(server: Postgres, tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        left = spawn(
            server.command(),
            env={"LC_ALL": "C.UTF-8"},
            log=log,
            cwd="/",
            death_signal=STOP_SIGNAL,
            uid=server.account.uid,
            gid=server.account.gid,
        )
        try:
            wait_until(server.ready, limit_s=30, what="the server answers")
            server.prepare()
            assert left.wait(10) == 0
        finally:
            end(left)


def test_a_database_starts_again_after_it_was_killed(server: Postgres, tmp_path: Path) -> None:
    for _ in range(2):
        with open(tmp_path / "log", "wb") as log:
            server.prepare()
            child = spawn(
                server.command(),
                env={"LC_ALL": "C.UTF-8"},
                log=log,
                cwd="/",
                death_signal=STOP_SIGNAL,
                uid=server.account.uid,
                gid=server.account.gid,
            )
            try:
                wait_until(server.ready, limit_s=30, what="the server answers")
                server.ensure_database("kept")
            finally:
                child.kill()
                child.wait()


def test_data_of_another_version_is_refused_in_words(server: Postgres) -> None:
    (server.directory / "PG_VERSION").write_text("14\n")
    with pytest.raises(PostgresError, match="is of PostgreSQL 14"):
        server.prepare()


def test_a_wrong_password_is_refused(server: Postgres, tmp_path: Path) -> None:
    with running_postgres() as running:
        stranger = replace(server, port=running.port, password="guess")
        assert not stranger.ready()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives up its name for the database")
def test_data_goes_elsewhere_when_the_database_cannot_reach_the_state_folder(tmp_path: Path) -> None:
    closed = tmp_path / "private"
    closed.mkdir(mode=0o700)
    account = Account.for_servers()
    elsewhere = home(closed / "state", account)
    assert elsewhere != closed / "state"
    assert account.may_reach(elsewhere)
    assert elsewhere == home(closed / "state", account)
