"""A person who signed up, and the actor they are."""

from __future__ import annotations

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import User
from marketplace.accounts.services import ensure_organisation


@pytest.fixture
def ada(db: None) -> User:
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    ensure_organisation(user)
    return user


@pytest.fixture
def owner(ada: User) -> Actor:
    return Actor.of_membership(ada.memberships.get())


@pytest.fixture
def signed_in(ada: User, client: Client) -> Client:
    """Signed in, and the password given once more, as pages that hand out secrets ask."""
    answer = client.post("/accounts/login/", {"login": ada.email, "password": "correct horse battery"})
    assert answer.status_code == 302
    assert client.post("/accounts/reauthenticate/", {"password": "correct horse battery"}).status_code == 302
    return client
