"""Which live feeds this installation reads: those it has a key for. List prices never change and are loaded by hand."""

from __future__ import annotations

from marketplace.catalog.feeds import Feed
from marketplace.catalog.feeds.prime import BASE_URL, PrimeFeed
from marketplace.settings import env_text


def configured_feeds() -> list[Feed]:
    key = env_text("PRIME_API_KEY", "")
    return [PrimeFeed(key, env_text("PRIME_API_BASE", BASE_URL))] if key else []
