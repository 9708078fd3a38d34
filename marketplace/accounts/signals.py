"""A person who signs up has an organisation. Sign-in repeats it, so a sign-up cut short in between is made whole."""

from __future__ import annotations

from typing import Any

from allauth.account.signals import user_logged_in, user_signed_up
from django.dispatch import receiver

from marketplace.accounts.models import User
from marketplace.accounts.services import ensure_organisation


@receiver([user_signed_up, user_logged_in])
def begin_organisation(sender: object, user: User, **_: Any) -> None:
    ensure_organisation(user)
