from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker_agent.errors import HomeBusy, NotEnrolled, StateDamaged
from worker_agent.state import Home, Identity, Memory, write_atomic

IDENTITY = Identity(server_url="http://s", agent_id="a", island_id="i", island_name="n", epoch=1, credential="one")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def test_an_identity_is_readable_by_its_owner_only(home: Home) -> None:
    home.save_identity(IDENTITY)
    assert home.identity_path.stat().st_mode & 0o777 == 0o600
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.load_identity() == IDENTITY


def test_a_home_without_identity_says_how_to_get_one(home: Home) -> None:
    with pytest.raises(NotEnrolled, match="enroll"):
        home.load_identity()


def test_a_damaged_identity_is_named_and_not_guessed(home: Home) -> None:
    home.identity_path.write_bytes(b'{"server_url": "http://s", "agen')
    with pytest.raises(StateDamaged, match=r"identity\.json"):
        home.load_identity()


def test_a_damaged_memory_is_forgotten(home: Home) -> None:
    home.memory_path.write_bytes(b"{")
    assert home.load_memory() == Memory()


def test_a_rotation_keeps_the_previous_credential_until_the_new_one_is_accepted() -> None:
    rotated = IDENTITY.rotated("two")
    assert (rotated.credential, rotated.previous_credential) == ("two", "one")
    assert rotated.rotated("two") == rotated
    assert rotated.settled().previous_credential is None
    assert rotated.fallen_back() == IDENTITY


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.save_identity(IDENTITY)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_atomic(home.identity_path, b"{}")
    assert home.load_identity() == IDENTITY
    assert list(home.path.glob(".*")) == []


def test_a_held_home_refuses_a_second_holder_and_names_the_first(home: Home) -> None:
    with home.locked():
        assert home.holder_pid() == os.getpid()
        with pytest.raises(HomeBusy, match=str(os.getpid())), home.locked():
            pytest.fail("two holders")
    assert home.holder_pid() is None


def test_leftovers_of_a_kill_during_a_write_are_cleared(home: Home) -> None:
    (home.path / ".identity.json.0badcafe.tmp").write_bytes(b"{half")
    with home.locked():
        assert list(home.path.glob(".*.tmp")) == []


@pytest.mark.parametrize("name", ["../x", "", ".", "..", "a/b", "a\0b", "x" * 200])
def test_an_assignment_id_cannot_leave_the_home(home: Home, name: str) -> None:
    with pytest.raises(StateDamaged):
        home.workdir(name)
