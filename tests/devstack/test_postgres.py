from __future__ import annotations

import psycopg

from tests.servers import running_postgres


def test_the_embedded_database_starts_and_answers() -> None:
    with running_postgres() as server, psycopg.connect(server.url("postgres")) as connection:
        row = connection.execute("SELECT current_setting('server_version_num')::int").fetchone()
    assert row is not None
    assert row[0] >= 180000
