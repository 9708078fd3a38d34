from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client

from marketplace.accounts.models import ApiKey, Organisation, User
from marketplace.accounts.services import create_organisation

VENDOR = Path(settings.BASE_DIR) / "marketplace" / "static" / "vendor"


def test_signing_up_makes_an_organisation_of_ones_own(db: None, client: Client) -> None:
    answer = client.post("/accounts/signup/", {"email": "grace@example.org", "password1": "a long pass phrase"})
    assert answer.status_code == 302
    page = client.get("/organisation/")
    assert page.status_code == 200
    assert "grace@example.org" in page.content.decode()
    assert Organisation.objects.get().name == "grace"


def test_the_landing_page_needs_no_account(db: None, client: Client) -> None:
    assert client.get("/").status_code == 200
    assert client.get("/organisation/").status_code == 302


@pytest.mark.parametrize("name", ["login", "signup", "password/reset"])
def test_the_entrance_pages_wear_the_house_style(db: None, client: Client, name: str) -> None:
    page = client.get(f"/accounts/{name}/").content.decode()
    assert "css/archipelago.css" in page
    assert 'class="field' in page


@pytest.mark.parametrize("name", ["email", "password/change", "logout"])
def test_the_account_pages_wear_the_house_style(signed_in: Client, name: str) -> None:
    assert "css/archipelago.css" in signed_in.get(f"/accounts/{name}/").content.decode()


def test_a_new_keys_secret_is_shown_once(signed_in: Client) -> None:
    made = signed_in.post("/organisation/keys", {"name": "ci", "role": "member", "expires_in_days": "30"})
    assert made.status_code == 201
    (secret,) = re.findall(r'id="new-key">(arc_[^<]+)<', made.content.decode())
    assert "no-store" in made["Cache-Control"]
    assert secret not in signed_in.get("/organisation/").content.decode()


def test_a_key_needs_a_password_given_not_long_ago(ada: User, client: Client) -> None:
    client.force_login(ada, backend=settings.AUTHENTICATION_BACKENDS[0])
    answer = client.post("/organisation/keys", {"name": "ci", "role": "member", "expires_in_days": "30"})
    assert answer.status_code == 302
    assert answer["Location"].startswith("/accounts/reauthenticate/")
    assert ApiKey.objects.count() == 0


@pytest.mark.parametrize(("field", "value"), [("name", " "), ("role", "king"), ("expires_in_days", "x")])
def test_a_refused_form_keeps_what_was_typed(signed_in: Client, field: str, value: str) -> None:
    typed = {"name": "nightly run", "role": "viewer", "expires_in_days": "7", field: value}
    answer = signed_in.post("/organisation/keys", typed)
    assert answer.status_code == 422
    assert 'class="problem"' in answer.content.decode()
    assert field == "name" or "nightly run" in answer.content.decode()


def test_revoking_on_the_page_ends_the_key(signed_in: Client) -> None:
    signed_in.post("/organisation/keys", {"name": "ci", "role": "member", "expires_in_days": "30"})
    key = ApiKey.objects.get()
    assert signed_in.post(f"/organisation/keys/{key.id}/revoke").status_code == 302
    key.refresh_from_db()
    assert key.revoked_at is not None


def test_a_person_acts_for_the_organisation_they_chose_and_no_other(signed_in: Client, ada: User) -> None:
    second = create_organisation(ada, name="Second")
    foreign = create_organisation(User.objects.create_user("eve@example.org"), name="Foreign")
    signed_in.post("/organisation/switch", {"organisation": second.id})
    assert signed_in.get("/api/v1/me").json()["organisation"]["name"] == "Second"
    signed_in.post("/organisation/switch", {"organisation": foreign.id})
    assert signed_in.get("/api/v1/me").json()["organisation"]["name"] == "Second"
    assert ada.memberships.filter(organisation=second).delete()[0] == 1
    assert signed_in.get("/api/v1/me").json()["organisation"]["name"] == "ada"


@pytest.mark.parametrize("path", ["/organisation/keys", "/organisation/rename", "/organisation/switch"])
def test_a_post_without_the_csrf_token_is_refused(ada: User, path: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(ada, backend=settings.AUTHENTICATION_BACKENDS[0])
    assert client.post(path, {}).status_code == 403


def test_pages_hold_no_inline_script_or_style(signed_in: Client) -> None:
    for path in ("/organisation/", "/accounts/email/"):
        page = signed_in.get(path)
        assert "Content-Security-Policy" in page
        assert not re.search(r"\sstyle=|<style|\son[a-z]+=|<script(?![^>]*\ssrc=)", page.content.decode())


def test_vendored_files_are_those_that_were_looked_at() -> None:
    listed = dict(reversed(line.split()) for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert found == listed
