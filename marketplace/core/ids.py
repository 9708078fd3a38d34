"""Public identifiers: a short prefix that says the kind, then 26 characters that sort by time and cannot be guessed.

`job_01jv6w3...`: 48 bits of milliseconds and 80 bits of randomness in Crockford's base 32 (the ULID layout).
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
LENGTH = 40  # room for any prefix in a column
NAMESPACE = uuid.UUID("6b1f6d0e-7a55-5c1c-9d3a-0a6c1b6e4f20")


def make_id(prefix: str, now_ms: int, entropy: bytes) -> str:
    value = (now_ms << 80) | int.from_bytes(entropy[:10])
    digits = []
    for _ in range(26):
        value, digit = divmod(value, 32)
        digits.append(ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"


def new_id(prefix: str) -> str:
    """At the edge only; pure code gets its ids as arguments."""
    return make_id(prefix, time.time_ns() // 1_000_000, secrets.token_bytes(10))


def fact_id(*parts: object) -> uuid.UUID:
    """The id of a named fact: the same fact has the same id, so a replay cannot create it twice."""
    return uuid.uuid5(NAMESPACE, "\x1f".join(str(part) for part in parts))


def new_secret(prefix: str) -> str:
    """A bearer secret of 256 bits, recognisable by its prefix (secret scanners can find it)."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def hash_secret(secret: str) -> str:
    """What is stored of a secret. SHA-256 suffices: the input has 256 bits of its own."""
    return hashlib.sha256(secret.encode()).hexdigest()
