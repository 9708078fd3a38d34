"""What every test can ask for. Servers are real, start only when a test needs them, and die with the test process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
from pytest_django import DjangoDbBlocker, Settings

from marketplace.devstack.state import StateDir
from tests.servers import TestPostgres, reachable_folder, running_postgres, running_valkey

# How long an example takes says more about the machine than about the code. What gates a change looks at the same
# examples every time, so that it fails for what the change did; everybody else looks at new ones, as many as they like.
hypothesis.settings.register_profile(
    "archipelago",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=int(os.environ.get("ARCHIPELAGO_EXAMPLES", "100")),
)
hypothesis.settings.load_profile("archipelago")


@pytest.fixture(autouse=True)
def no_wake_ups(settings: Settings) -> None:
    """Wake-ups go to a broker, which most tests have not; those of wake-ups switch them on."""
    settings.WAKE_UPS = False


@pytest.fixture(autouse=True)
def no_payment_provider(settings: Settings) -> None:
    """Nobody listens there: a test that pays starts a stand-in, and none ever reaches the provider itself."""
    settings.STRIPE_API_BASE = "http://127.0.0.1:1"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[TestPostgres | None]:
    """The database server of this test process; None when DATABASE_URL names one."""
    if os.environ.get("DATABASE_URL"):
        yield None
        return
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres_server: TestPostgres | None) -> None:
    """Point Django at the embedded server, the moment a test first needs a database and not before."""
    from django.db import connections

    settings = connections["default"].settings_dict
    name = os.environ.get("ARCHIPELAGO_TEST_DB") or "test_archipelago"
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    settings["TEST"]["NAME"] = f"{name}_{worker}" if worker else name
    if postgres_server is not None:
        settings.update(
            HOST="127.0.0.1",
            PORT=str(postgres_server.port),
            USER=postgres_server.user,
            PASSWORD=postgres_server.password,
            NAME="postgres",
        )


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    """Put aside the guards against TRUNCATE: it is how Django empties the tables after a test that commits."""
    from django.db import connection

    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT format('ALTER TABLE %s DISABLE TRIGGER %I', tgrelid::regclass, tgname)"
            " FROM pg_trigger WHERE NOT tgisinternal AND tgtype & 32 <> 0"
        )
        for (statement,) in cursor.fetchall():
            cursor.execute(statement)


@pytest.fixture(scope="session")
def test_database_url(django_db_setup: None) -> str:
    """The test database's URL, for processes of ours that a test starts."""
    from django.db import connections

    s = connections["default"].settings_dict
    return f"postgresql://{s['USER']}:{s['PASSWORD']}@{s['HOST']}:{s['PORT']}/{s['NAME']}"


@pytest.fixture(scope="module")
def stack_state() -> Iterator[StateDir]:
    """A state folder of this module's own, for `marketplace.devstack.stack.Stack`; gone afterwards."""
    with reachable_folder() as folder:
        yield StateDir(folder)


@pytest.fixture(scope="session")
def _valkey() -> Iterator[str]:
    with running_valkey() as url:
        yield url


@pytest.fixture
def valkey_url(_valkey: str) -> str:
    """A real broker, empty at the start of each test."""
    import redis

    with redis.Redis.from_url(_valkey) as client:
        client.flushall()
    return _valkey
