from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from marketplace.settings import _database, env_flag, env_int, env_text


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_NAME", raising=False)
    with pytest.raises(ImproperlyConfigured, match="SOME_NAME"):
        env_text("SOME_NAME")
    assert env_text("SOME_NAME", "default") == "default"


def test_a_secret_can_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from the file\n")
    monkeypatch.setenv("SOME_NAME_FILE", str(tmp_path / "secret"))
    assert env_text("SOME_NAME") == "from the file"
    monkeypatch.setenv("SOME_NAME", "from the environment")
    with pytest.raises(ImproperlyConfigured, match="both set"):
        env_text("SOME_NAME")


def test_a_secret_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_NAME_FILE", str(tmp_path / "absent"))
    with pytest.raises(ImproperlyConfigured, match="absent"):
        env_text("SOME_NAME", "a default does not hide it")


@pytest.mark.parametrize("text", ["", "12", "-3"])
def test_whole_numbers_are_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SOME_NUMBER", text)
    assert env_int("SOME_NUMBER", 7) == (int(text) if text else 7)


def test_a_malformed_number_or_flag_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NUMBER", "5s")
    monkeypatch.setenv("SOME_FLAG", "yes please")
    with pytest.raises(ImproperlyConfigured, match=r"SOME_NUMBER.*5s"):
        env_int("SOME_NUMBER", 1)
    with pytest.raises(ImproperlyConfigured, match="SOME_FLAG"):
        env_flag("SOME_FLAG", default=False)


def test_only_postgresql_is_accepted() -> None:
    with pytest.raises(ImproperlyConfigured, match="postgresql://"):
        _database("sqlite:///db.sqlite3")


def test_a_database_url_is_read_whole() -> None:
    found = _database("postgresql://a%40b:p%2Fw@db.internal:6432/shop?sslmode=require")
    assert (found["USER"], found["PASSWORD"], found["HOST"], found["PORT"], found["NAME"]) == (
        "a@b",
        "p/w",
        "db.internal",
        "6432",
        "shop",
    )
    assert found["OPTIONS"]["sslmode"] == "require"
    assert "statement_timeout=5000" in found["OPTIONS"]["options"]
