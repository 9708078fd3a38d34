"""Which organisation a signed-in person acts for: the one chosen in the session while they are still a member of it.

Invariant: `request.actor` and `request.organisation` are set on every request (None without a membership); the session
only names a wish, membership is read anew each time, so someone removed is out at once.
"""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from marketplace.accounts.access import Actor
from marketplace.accounts.models import User
from marketplace.accounts.selectors import memberships_of

SESSION_KEY = "organisation_id"


class CurrentOrganisation:
    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        user = request.user
        memberships = memberships_of(user) if isinstance(user, User) else []
        wish = request.session.get(SESSION_KEY) if memberships else None
        chosen = next((each for each in memberships if each.organisation_id == wish), None)
        if chosen is None and memberships:
            chosen = memberships[0]
        actor = Actor.of_membership(chosen) if chosen is not None else None
        request.memberships = memberships  # type: ignore[attr-defined]
        request.actor = actor  # type: ignore[attr-defined]
        request.organisation = actor.organisation if actor is not None else None  # type: ignore[attr-defined]
        return self.get_response(request)
