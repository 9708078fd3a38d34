"""The operator's way in: an account from the command line, whose key works at once."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from marketplace.accounts.models import Membership, User

pytestmark = pytest.mark.django_db


PHRASE = "correct horse battery"


def add(monkeypatch: pytest.MonkeyPatch, email: str, password: str = PHRASE) -> dict[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{password}\n"))
    out = io.StringIO()
    call_command("add_account", email, "North", stdout=out)
    answer: dict[str, str] = json.loads(out.getvalue())
    return answer


def test_an_added_account_signs_in_and_its_key_acts_for_its_organisation(monkeypatch: pytest.MonkeyPatch) -> None:
    added = add(monkeypatch, "Ada@Example.org")

    answer = Client().get("/api/v1/me", headers={"Authorization": f"Bearer {added['api_key']}"})

    assert answer.json()["organisation"] == {"id": added["organisation_id"], "name": "North"}
    assert Client().login(email="ada@example.org", password=PHRASE)
    assert [m.organisation_id for m in Membership.objects.all()] == [added["organisation_id"]]


@pytest.mark.parametrize(("email", "password"), [("no address", "correct horse battery"), ("a@example.org", "1234")])
def test_bad_input_is_refused_in_words_and_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, email: str, password: str
) -> None:
    with pytest.raises(CommandError):
        add(monkeypatch, email, password)

    assert not User.objects.exists()


def test_an_address_has_one_account(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "ada@example.org")

    with pytest.raises(CommandError, match="already"):
        add(monkeypatch, "ADA@example.org")


def test_an_operator_is_made_of_an_account_that_is_there_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "ada@example.org")
    call_command("make_operator", "Ada@example.org")
    assert User.objects.get().is_staff
    call_command("make_operator", "ada@example.org", no_longer=True)
    assert not User.objects.get().is_staff
    with pytest.raises(CommandError, match="no account"):
        call_command("make_operator", "eve@example.org")
