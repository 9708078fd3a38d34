"""What is read of accounts. Invariant: everything below an organisation is reached through that organisation."""

from __future__ import annotations

from datetime import datetime

from django.db.models import QuerySet

from marketplace.accounts.models import ApiKey, Invitation, Membership, Organisation, User
from marketplace.core.ids import hash_secret


def memberships_of(user: User) -> list[Membership]:
    """Oldest first: the first is where a person lands who has chosen none."""
    return list(user.memberships.select_related("organisation").order_by("created_at", "id"))


def members_of(organisation: Organisation) -> QuerySet[Membership]:
    return organisation.memberships.select_related("user").order_by("created_at", "id")


def open_invitations_of(organisation: Organisation, now: datetime) -> QuerySet[Invitation]:
    return organisation.invitations.filter(accepted_at=None, revoked_at=None, expires_at__gt=now).order_by("created_at")


def keys_of(organisation: Organisation) -> QuerySet[ApiKey]:
    """Newest first, revoked and expired ones included: a key that worked once stays accounted for."""
    return organisation.api_keys.select_related("created_by").order_by("-created_at", "-id")


def live_key(secret: str, now: datetime) -> ApiKey | None:
    """The key of this secret if it still opens anything."""
    key = (
        ApiKey.objects.select_related("organisation")
        .filter(secret_hash=hash_secret(secret), revoked_at__isnull=True)
        .first()
    )
    if key is None or (key.expires_at is not None and key.expires_at <= now):
        return None
    return key
