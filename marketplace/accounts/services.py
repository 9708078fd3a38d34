"""What changes accounts: organisations begin, keys are issued and revoked.

Invariant: every write here carries its audit event in its own transaction, and a secret leaves once, in the return
value of `issue_key`; the database keeps only its hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from marketplace.accounts.access import Action, Actor, demand, may_grant
from marketplace.accounts.audit import record
from marketplace.accounts.models import ApiKey, Membership, Organisation, Role, User
from marketplace.accounts.selectors import keys_of, memberships_of
from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from marketplace.core.ids import hash_secret, new_secret

KEY_PREFIX = "arc"
HINT_LENGTH = 12
KEY_DAYS_DEFAULT = 90
KEY_DAYS_MAX = 365
# More live keys than this is a leak or a loop, and nobody can look after them.
LIVE_KEYS_MAX = 50
NAME_LENGTH_MAX = 120
# A busy key need not write a row for every request; a minute is exact enough to see whether it is in use.
USED_GRAIN = timedelta(minutes=1)


@dataclass(frozen=True)
class IssuedKey:
    """A new key with its secret, which exists nowhere else from here on."""

    key: ApiKey
    secret: str


def create_organisation(owner: User, *, name: str) -> Organisation:
    """Begin an organisation with its owner."""
    with transaction.atomic():
        organisation = Organisation.objects.create(name=_name(name))
        Membership.objects.create(user=owner, organisation=organisation, role=Role.OWNER)
        record(organisation, f"user:{owner.pk}", "organisation.created", organisation.id, name=organisation.name)
    return organisation


def ensure_organisation(user: User) -> Organisation:
    """The user's first organisation, begun when there is none. Safe to repeat: at sign-up and at every sign-in."""
    with transaction.atomic():
        # Two sign-ins at once would otherwise both find nothing.
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        memberships = memberships_of(user)
        if memberships:
            return memberships[0].organisation
        return create_organisation(user, name=user.email.partition("@")[0][:NAME_LENGTH_MAX] or "My organisation")


def rename_organisation(actor: Actor, *, name: str) -> None:
    demand(actor, Action.MANAGE)
    new = _name(name)
    with transaction.atomic():
        organisation = Organisation.objects.select_for_update(no_key=True).get(pk=actor.organisation.pk)
        if organisation.name == new:
            return
        old, organisation.name = organisation.name, new
        organisation.save(update_fields=["name"])
        record(organisation, actor.name, "organisation.renamed", organisation.id, before=old, after=new)


def issue_key(
    actor: Actor,
    *,
    name: str,
    now: datetime,
    role: str = Role.MEMBER,
    expires_in_days: int = KEY_DAYS_DEFAULT,
    created_by: User | None = None,
) -> IssuedKey:
    """Make a key that acts in `role`, at most the actor's own. A retry makes a second key: the answer of the first
    cannot be stored, because it holds the secret; the unused key stays visible in the list, to be revoked."""
    demand(actor, Action.MANAGE)
    if role not in Role.values:
        raise InvalidInput.at("role", f"must be one of {', '.join(Role.values)}")
    if not may_grant(actor, role):
        raise Forbidden(f"you cannot give the role {role}: it is above your own", code="role_too_low")
    if not 1 <= expires_in_days <= KEY_DAYS_MAX:
        raise InvalidInput.at("expires_in_days", f"must be from 1 to {KEY_DAYS_MAX}")
    clean, secret = _name(name), new_secret(KEY_PREFIX)
    with transaction.atomic():
        # The lock makes the count below hold until the key is in.
        organisation = Organisation.objects.select_for_update(no_key=True).get(pk=actor.organisation.pk)
        live = keys_of(organisation).filter(revoked_at__isnull=True, expires_at__gt=now).count()
        if live >= LIVE_KEYS_MAX:
            raise Conflict(f"this organisation has {live} live keys: revoke one first", code="too_many_keys")
        key = ApiKey.objects.create(
            organisation=organisation,
            created_by=created_by,
            name=clean,
            role=role,
            secret_hash=hash_secret(secret),
            hint=secret[:HINT_LENGTH],
            expires_at=now + timedelta(days=expires_in_days),
        )
        record(organisation, actor.name, "api_key.issued", key.id, name=clean, role=role, hint=key.hint)
    return IssuedKey(key, secret)


def revoke_key(actor: Actor, key_id: str, *, now: datetime) -> None:
    """From the next request on the key opens nothing. Revoking twice is revoking once."""
    demand(actor, Action.MANAGE)
    with transaction.atomic():
        mine = ApiKey.objects.filter(organisation=actor.organisation, id=key_id)
        if mine.filter(revoked_at__isnull=True).update(revoked_at=now):
            record(actor.organisation, actor.name, "api_key.revoked", key_id)
        elif not mine.exists():
            raise NotFound("there is no such key")


def note_key_use(key: ApiKey, *, now: datetime) -> None:
    if key.last_used_at is None or now - key.last_used_at >= USED_GRAIN:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)


def _name(text: str) -> str:
    clean = " ".join(text.split())
    if not clean:
        raise InvalidInput.at("name", "a name is needed")
    if len(clean) > NAME_LENGTH_MAX:
        raise InvalidInput.at("name", f"at most {NAME_LENGTH_MAX} characters")
    if not clean.isprintable():
        raise InvalidInput.at("name", "a name has no control characters")
    return clean
