"""A write that may be retried: the same Idempotency-Key gets the first answer, never a second effect.

Invariant: the answer is stored in the transaction of its effect, so there is no effect without an answer. Of two
requests with one key at once, one works and the other is told to wait (409); a key that comes with another body is a
mistake of the caller (422). A refusal stores nothing: the transaction it was raised in is rolled back, and the same
key may be tried again. Answers are stored in clear, so a handler whose answer holds a secret must not use this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction
from django.http import HttpRequest
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from marketplace.accounts.access import current_actor
from marketplace.accounts.models import IdempotencyRecord
from marketplace.core.errors import Conflict, InvalidInput

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEY_LENGTH_MAX = 200


def idempotent(request: HttpRequest | Request, route: str, body: Any, handler: Callable[[], Response]) -> Response:
    """Run `handler` once for this organisation, route and key; `body` is the parsed request, as JSON.

    `handler` runs inside one transaction with the stored answer: it makes no network call.
    """
    key = request.headers.get(HEADER, "").strip()
    if not key:
        raise InvalidInput.at(HEADER, "this request needs an Idempotency-Key header", code="idempotency_key_missing")
    if len(key) > KEY_LENGTH_MAX or not key.isascii() or not key.isprintable():
        raise InvalidInput.at(HEADER, f"at most {KEY_LENGTH_MAX} printable ASCII characters")
    organisation = current_actor(request).organisation
    body_hash = hash_body(body)
    with transaction.atomic():
        _lock_or_conflict(f"{organisation.id}\x1f{route}\x1f{key}")
        stored = IdempotencyRecord.objects.filter(organisation=organisation, route=route, key=key).first()
        if stored is not None:
            if stored.body_hash != body_hash:
                raise InvalidInput.at(HEADER, "this key was used with another body", code="idempotency_key_reused")
            return Response(stored.response, status=stored.status, headers={REPLAYED: "true"})
        answer = handler()
        IdempotencyRecord.objects.create(
            organisation=organisation,
            key=key,
            route=route,
            body_hash=body_hash,
            status=answer.status_code,
            response=json.loads(JSONRenderer().render(answer.data) or "null"),
        )
        return answer


def hash_body(body: Any) -> str:
    """The same for the same JSON, whatever the order of its fields."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _lock_or_conflict(name: str) -> None:
    """An advisory lock until the transaction ends. Waiting for the unique index instead would hold a connection."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [number])
        (taken,) = cursor.fetchone()
    if not taken:
        raise Conflict("a request with this key is being worked on", code="idempotency_key_in_use", retry_after_s=1)
