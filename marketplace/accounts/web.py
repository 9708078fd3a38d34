"""The pages of accounts: the landing page, and the organisation with its members and keys.

A form that is refused comes back as it was typed, with what is wrong beside the field. A new key's secret is shown in
the answer to its own POST and nowhere else: it is never put into a session, a message or an address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from smtplib import SMTPException
from typing import Any

from allauth.account.decorators import reauthentication_required
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.mail import send_mail
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from marketplace.accounts import members, selectors, services
from marketplace.accounts.access import Action, current_actor, may, may_grant
from marketplace.accounts.middleware import SESSION_KEY
from marketplace.accounts.models import Role, User
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem

logger = logging.getLogger(__name__)

LIFETIMES_DAYS = (7, 30, 90, 365)
KEYS_SHOWN = 100


@require_GET
def landing(request: HttpRequest) -> HttpResponse:
    """What is this, for those who are not signed in; the others are taken to their organisation."""
    if request.user.is_authenticated:
        return redirect("accounts:organisation")
    return render(request, "landing.html")


@login_required
@never_cache
@require_GET
def organisation(request: HttpRequest) -> HttpResponse:
    if not selectors.memberships_of(_person(request)):
        services.ensure_organisation(_person(request))
        return redirect("accounts:organisation")
    return _organisation_page(request)


@login_required
@require_POST
def rename(request: HttpRequest) -> HttpResponse:
    name = request.POST.get("name", "")
    try:
        services.rename_organisation(current_actor(request), name=name)
    except Problem as problem:
        return _organisation_page(request, rename={"name": name, "error": problem.message}, status=problem.status)
    messages.success(request, "The organisation has its new name.")
    return redirect("accounts:organisation")


@login_required
@require_POST
def switch(request: HttpRequest) -> HttpResponse:
    """Act for another organisation; one that is not theirs changes nothing."""
    wish = request.POST.get("organisation", "")
    memberships = selectors.memberships_of(_person(request))
    if any(each.organisation_id == wish for each in memberships):
        request.session[SESSION_KEY] = wish
    return redirect("accounts:organisation")


@login_required
@never_cache
@require_POST
@reauthentication_required
def issue_key(request: HttpRequest) -> HttpResponse:
    typed = {name: request.POST.get(name, "") for name in ("name", "role", "expires_in_days")}
    try:
        if not typed["expires_in_days"].isdecimal() or len(typed["expires_in_days"]) > len(str(services.KEY_DAYS_MAX)):
            raise InvalidInput.at("expires_in_days", "choose how long the key shall work")
        issued = services.issue_key(
            current_actor(request),
            name=typed["name"],
            role=typed["role"],
            expires_in_days=int(typed["expires_in_days"]),
            now=database_now(),
            created_by=_person(request),
        )
    except Problem as problem:
        errors = {each.field: each.message for each in problem.fields}
        form = {**typed, "errors": errors, "error": "" if errors else problem.message}
        return _organisation_page(request, key_form=form, status=problem.status)
    return _organisation_page(request, issued=issued, status=201)


@login_required
@require_POST
def revoke_key(request: HttpRequest, key_id: str) -> HttpResponse:
    return _told(
        request,
        lambda: services.revoke_key(current_actor(request), key_id, now=database_now()),
        "The key is revoked. Requests with it are refused from now on.",
    )


@login_required
@never_cache
@require_POST
def invite(request: HttpRequest) -> HttpResponse:
    """Invite by e-mail; the link is shown as well, for where mail does not arrive."""
    typed = {name: request.POST.get(name, "") for name in ("email", "role")}
    try:
        sent = members.invite(current_actor(request), now=database_now(), **typed)
    except Problem as problem:
        errors = {each.field: each.message for each in problem.fields}
        form = {**typed, "errors": errors, "error": "" if errors else problem.message}
        return _organisation_page(request, invite_form=form, status=problem.status)
    link = request.build_absolute_uri(reverse("accounts:invitation", args=[sent.secret]))
    invitation = sent.invitation
    context = {
        "organisation": invitation.organisation.name,
        "role": invitation.get_role_display().lower(),
        "email": invitation.email,
        "link": link,
        "expires_at": invitation.expires_at,
    }
    try:
        send_mail(
            f"Join {invitation.organisation.name} on Archipelago",
            render_to_string("accounts/invitation_mail.txt", context),
            None,
            [invitation.email],
        )
    except (OSError, SMTPException):
        # The invitation stands and the page shows its link: the person who invited can pass it on.
        logger.warning("the mail of invitation %s could not be sent", invitation.id, exc_info=True)
    return _organisation_page(request, invited=sent, invitation_link=link, status=201)


@login_required
@require_POST
def withdraw_invitation(request: HttpRequest, invitation_id: str) -> HttpResponse:
    return _told(
        request,
        lambda: members.withdraw(current_actor(request), invitation_id, now=database_now()),
        "The invitation is withdrawn.",
    )


@login_required
@require_POST
def change_role(request: HttpRequest, membership_id: int) -> HttpResponse:
    role = request.POST.get("role", "")
    return _told(
        request,
        lambda: members.change_role(current_actor(request), membership_id, role=role),
        "The role is changed, from their next request on.",
    )


@login_required
@require_POST
def remove_member(request: HttpRequest, membership_id: int) -> HttpResponse:
    return _told(request, lambda: members.remove(current_actor(request), membership_id), "They are no longer a member.")


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def invitation(request: HttpRequest, secret: str) -> HttpResponse:
    """What an invitation's link opens: who invites, and the button that accepts."""
    now = database_now()
    try:
        found = members.invitation_of(secret, now)
    except Problem as problem:
        messages.error(request, f"{problem.message}.")
        return redirect("accounts:organisation")
    if request.method == "POST":
        try:
            membership = members.accept(_person(request), secret, now=now)
        except Problem as problem:
            context = {"invitation": found, "problem": problem.message}
            return render(request, "accounts/invitation.html", context, status=problem.status)
        request.session[SESSION_KEY] = membership.organisation_id
        messages.success(request, f"You are a member of {membership.organisation.name}.")
        return redirect("accounts:organisation")
    return render(request, "accounts/invitation.html", {"invitation": found})


def _told(request: HttpRequest, change: Callable[[], None], done: str) -> HttpResponse:
    """Make a change that a button asks for, and say on the page what became of it."""
    try:
        change()
    except Problem as problem:
        messages.error(request, f"Nothing was changed: {problem.message}.")
    else:
        messages.success(request, done)
    return redirect("accounts:organisation")


def _person(request: HttpRequest) -> User:
    if not isinstance(request.user, User):
        raise TypeError("a page behind login_required has a user")
    return request.user


def _organisation_page(request: HttpRequest, *, status: int = 200, **extra: Any) -> HttpResponse:
    actor = current_actor(request)
    now = database_now()
    manages = may(actor, Action.MANAGE)
    # A rename in this very request is already in the database and not yet in the actor.
    actor.organisation.refresh_from_db(fields=["name"])
    keys = [
        {
            "key": key,
            "state": "revoked" if key.revoked_at else "expired" if key.expires_at and key.expires_at <= now else "live",
        }
        for key in (selectors.keys_of(actor.organisation)[:KEYS_SHOWN] if manages else [])
    ]
    context = {
        "organisation": actor.organisation,
        "manages": manages,
        "members": selectors.members_of(actor.organisation),
        "invitations": selectors.open_invitations_of(actor.organisation, now) if manages else [],
        "all_roles": list(Role),
        "invite_form": {"role": Role.MEMBER},
        "keys": keys,
        "roles": [role for role in Role if may_grant(actor, role)],
        "lifetimes_days": LIFETIMES_DAYS,
        "key_form": {"role": Role.MEMBER, "expires_in_days": str(services.KEY_DAYS_DEFAULT)},
        **extra,
    }
    return render(request, "accounts/organisation.html", context, status=status)
