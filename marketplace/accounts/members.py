"""What changes membership: invitations, roles, leaving.

Invariant: an organisation keeps an owner; nobody changes someone above their own role or gives a role above it; each
change takes the organisation's row lock, so that two owners cannot remove each other at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction

from marketplace.accounts.access import Action, Actor, demand, may_grant
from marketplace.accounts.audit import record
from marketplace.accounts.models import Invitation, Membership, Organisation, Role, User
from marketplace.core.errors import Conflict, Forbidden, Gone, InvalidInput, NotFound
from marketplace.core.ids import hash_secret, new_secret

INVITATION_PREFIX = "inv"
INVITATION_DAYS = 7
OPEN_INVITATIONS_MAX = 50


@dataclass(frozen=True)
class SentInvitation:
    """An invitation with the secret of its link, which exists nowhere else from here on."""

    invitation: Invitation
    secret: str


def invite(actor: Actor, *, email: str, role: str, now: datetime) -> SentInvitation:
    """Invite an address. Inviting it again replaces the invitation before, whose link then opens nothing."""
    demand(actor, Action.MANAGE)
    _grantable(actor, role)
    address = email.strip().lower()
    try:
        validate_email(address)
    except ValidationError as error:
        raise InvalidInput.at("email", "this is not an e-mail address") from error
    secret = new_secret(INVITATION_PREFIX)
    with transaction.atomic():
        organisation = _locked(actor.organisation)
        if Membership.objects.filter(organisation=organisation, user__email__iexact=address).exists():
            raise Conflict("they are a member already", code="already_a_member")
        waiting = organisation.invitations.filter(accepted_at=None, revoked_at=None)
        waiting.filter(email=address).update(revoked_at=now)
        if waiting.filter(expires_at__gt=now).count() >= OPEN_INVITATIONS_MAX:
            raise Conflict("too many open invitations: withdraw one first", code="too_many_invitations")
        invitation = Invitation.objects.create(
            organisation=organisation,
            email=address,
            role=role,
            secret_hash=hash_secret(secret),
            invited_by=actor.name,
            created_at=now,
            expires_at=now + timedelta(days=INVITATION_DAYS),
        )
        record(organisation, actor.name, "member.invited", invitation.id, email=address, role=role)
    return SentInvitation(invitation, secret)


def withdraw(actor: Actor, invitation_id: str, *, now: datetime) -> None:
    """Its link opens nothing from now on. Withdrawing twice is withdrawing once."""
    demand(actor, Action.MANAGE)
    with transaction.atomic():
        mine = Invitation.objects.filter(organisation=actor.organisation, id=invitation_id)
        if mine.filter(accepted_at=None, revoked_at=None).update(revoked_at=now):
            record(actor.organisation, actor.name, "invitation.withdrawn", invitation_id)
        elif not mine.exists():
            raise NotFound("there is no such invitation")


def invitation_of(secret: str, now: datetime) -> Invitation:
    """The invitation of a link, while it can still be accepted."""
    found = Invitation.objects.select_related("organisation").filter(secret_hash=hash_secret(secret)).first()
    if found is None:
        raise NotFound("this link opens no invitation")
    if found.accepted_at is not None or found.revoked_at is not None or found.expires_at <= now:
        raise Gone("this invitation was accepted, withdrawn or is over a week old: ask for a new one")
    return found


def accept(user: User, secret: str, *, now: datetime) -> Membership:
    """Join; only the owner of the invited address may. Accepting twice joins once."""
    invitation = invitation_of(secret, now)
    if user.email.lower() != invitation.email:
        raise Forbidden(
            f"this invitation is for {invitation.email}, you are signed in as {user.email}", code="other_address"
        )
    with transaction.atomic():
        organisation = _locked(invitation.organisation)
        open_still = Invitation.objects.filter(pk=invitation.pk, accepted_at=None, revoked_at=None)
        if not open_still.update(accepted_at=now):
            raise Gone("this invitation was accepted or withdrawn")
        membership, joined = Membership.objects.get_or_create(
            user=user, organisation=organisation, defaults={"role": invitation.role}
        )
        if joined:
            record(organisation, f"user:{user.pk}", "member.joined", str(user.pk), role=membership.role)
    return membership


def change_role(actor: Actor, membership_id: int, *, role: str) -> None:
    demand(actor, Action.MANAGE)
    _grantable(actor, role)
    with transaction.atomic():
        membership = _member(actor, membership_id)
        if membership.role == role:
            return
        if not may_grant(actor, membership.role):
            raise Forbidden("their role is above your own", code="role_too_low")
        _keep_an_owner(membership)
        before, membership.role = membership.role, role
        membership.save(update_fields=["role"])
        record(
            actor.organisation, actor.name, "member.role_changed", str(membership.user_id), before=before, after=role
        )


def remove(actor: Actor, membership_id: int) -> None:
    """End a membership. Everybody may leave; to remove others takes the right to manage. Keys stay: they are the
    organisation's, not a person's."""
    with transaction.atomic():
        membership = _member(actor, membership_id)
        if actor.name != f"user:{membership.user_id}":
            demand(actor, Action.MANAGE)
            if not may_grant(actor, membership.role):
                raise Forbidden("their role is above your own", code="role_too_low")
        _keep_an_owner(membership)
        membership.delete()
        record(actor.organisation, actor.name, "member.removed", str(membership.user_id), role=membership.role)


def _member(actor: Actor, membership_id: int) -> Membership:
    _locked(actor.organisation)
    found = Membership.objects.filter(organisation=actor.organisation, pk=membership_id).first()
    if found is None:
        raise NotFound("there is no such member")
    return found


def _locked(organisation: Organisation) -> Organisation:
    return Organisation.objects.select_for_update(no_key=True).get(pk=organisation.pk)


def _grantable(actor: Actor, role: str) -> None:
    if role not in Role.values:
        raise InvalidInput.at("role", f"must be one of {', '.join(Role.values)}")
    if not may_grant(actor, role):
        raise Forbidden(f"you cannot give the role {role}: it is above your own", code="role_too_low")


def _keep_an_owner(membership: Membership) -> None:
    """The caller holds the organisation's lock, so the count holds until the change is in."""
    owners = Membership.objects.filter(organisation=membership.organisation_id, role=Role.OWNER)
    if membership.role == Role.OWNER and owners.count() == 1:
        raise Conflict("an organisation keeps an owner: make somebody else one first", code="last_owner")
