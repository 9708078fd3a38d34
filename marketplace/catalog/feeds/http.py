"""What live feeds have in common: one request whose failure is a FeedError, and JSON whose numbers are decimals.

Invariant: neither a key nor the address of a request is in what an error says; no price passes through a float.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import httpx

from marketplace.catalog.feeds import FeedError

TIMEOUT_S = 20.0
MIB_PER_GIB = 1024
CENTS_PER_USD = 100


def read(
    base_url: str,
    path: str,
    *,
    bearer: str = "",
    headers: dict[str, str] | None = None,
    query: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
) -> bytes:
    """The answer to a GET; to a POST where there is a body."""
    sent = {**(headers or {}), **({"Authorization": f"Bearer {bearer}"} if bearer else {})}
    try:
        with httpx.Client(base_url=base_url, headers=sent, timeout=TIMEOUT_S) as client:
            answer = client.get(path, params=query) if body is None else client.post(path, params=query, json=body)
            answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise FeedError(f"answered {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise FeedError(type(error).__name__) from error
    return answer.content


def loaded(body: bytes) -> Any:
    """JSON; a source that sends none has failed."""
    try:
        return json.loads(body, parse_float=Decimal)
    except ValueError as error:
        raise FeedError(f"not JSON: {error}") from error


def unexpected(error: Exception) -> FeedError:
    """A shape that is not the one the source promises."""
    return FeedError(f"not the expected shape: {type(error).__name__}: {error}")


def kept(item: Any) -> dict[str, Any]:
    """What came, as it can be stored."""
    plain: dict[str, Any] = json.loads(json.dumps(item, default=str))
    return plain


def dollars(cents: int | Decimal | None) -> str | None:
    """Cents as exact dollars; what is not stated stays so."""
    return None if cents is None else str(Decimal(cents) / CENTS_PER_USD)
