"""The pages of accounts: the landing page, and the organisation with its members and keys.

A form that is refused comes back as it was typed, with what is wrong beside the field. A new key's secret is shown in
the answer to its own POST and nowhere else: it is never put into a session, a message or an address.
"""

from __future__ import annotations

from typing import Any

from allauth.account.decorators import reauthentication_required
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from marketplace.accounts import selectors, services
from marketplace.accounts.access import Action, current_actor, may, may_grant
from marketplace.accounts.middleware import SESSION_KEY
from marketplace.accounts.models import Role, User
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem

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
    try:
        services.revoke_key(current_actor(request), key_id, now=database_now())
    except Problem as problem:
        messages.error(request, f"Nothing was revoked: {problem.message}.")
    else:
        messages.success(request, "The key is revoked. Requests with it are refused from now on.")
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
        "keys": keys,
        "roles": [role for role in Role if may_grant(actor, role)],
        "lifetimes_days": LIFETIMES_DAYS,
        "key_form": {"role": Role.MEMBER, "expires_in_days": str(services.KEY_DAYS_DEFAULT)},
        **extra,
    }
    return render(request, "accounts/organisation.html", context, status=status)
