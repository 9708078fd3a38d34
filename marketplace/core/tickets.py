"""A form that may be sent twice makes one thing: it carries, signed, the id that the thing will have.

Invariant: an id comes only from us, so nobody chooses one; a form without a good ticket is a wish still, only not safe
from being sent twice.
"""

from __future__ import annotations

from django.core.signing import BadSignature, Signer

FIELD = "ticket"


class Tickets:
    """Of one kind of form, named by `salt`."""

    def __init__(self, salt: str) -> None:
        self._signer = Signer(salt=salt)

    def issue(self, new_id: str) -> str:
        return self._signer.sign(new_id)

    def read(self, ticket: str) -> str | None:
        """The id; None for a ticket that is none of ours."""
        try:
            return self._signer.unsign(ticket)
        except BadSignature:
            return None
