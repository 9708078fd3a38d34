"""How a program shows who it is: `Authorization: Bearer arc_...`.

Invariant: a wrong, expired or revoked key is 401 and says no more; a good one sets `request.actor` and
`request.organisation`, over whatever a session cookie in the same request would have meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from marketplace.accounts.access import Actor
from marketplace.accounts.models import ApiKey
from marketplace.accounts.selectors import live_key
from marketplace.accounts.services import KEY_PREFIX, note_key_use
from marketplace.core.clock import database_now

SCHEME = "bearer"


@dataclass(frozen=True)
class KeyHolder:
    """Stands where a user would: a program is nobody's login, and has no pages."""

    key_id: str
    pk: None = None
    is_authenticated: ClassVar[bool] = True
    is_anonymous: ClassVar[bool] = False
    is_active: ClassVar[bool] = True
    is_staff: ClassVar[bool] = False


class ApiKeyAuthentication(BaseAuthentication):
    def authenticate(self, request: Request) -> tuple[KeyHolder, ApiKey] | None:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != SCHEME or not secret.startswith(f"{KEY_PREFIX}_"):
            return None  # another kind of credential, or none
        now = database_now()
        key = live_key(secret.strip(), now)
        if key is None:
            raise AuthenticationFailed("this API key is not valid: unknown, expired or revoked")
        note_key_use(key, now=now)
        actor = Actor.of_key(key)
        # Both faces of the request, so that whatever reads it downstream sees the key and not the session.
        for face in (request, request._request):
            face.actor, face.organisation = actor, actor.organisation  # type: ignore[attr-defined]
        return KeyHolder(key.id), key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="archipelago"'
