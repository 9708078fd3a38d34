"""Who runs the market: people marked as staff, who see what no customer sees and decide what no rule can.

Invariant: to everybody else an operator's page is not there, so its address tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache

from marketplace.accounts.models import User
from marketplace.core.errors import NotFound

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponse]


def operators_only(view: View[P]) -> View[P]:
    @login_required
    @never_cache
    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not is_operator(request):
            raise NotFound("there is no such page")
        return view(request, *args, **kwargs)

    return guarded


def is_operator(request: HttpRequest) -> bool:
    user = request.user
    return isinstance(user, User) and user.is_active and user.is_staff


def operator_name(request: HttpRequest) -> str:
    """What the audit trail shows."""
    return f"operator:{request.user.pk}"
