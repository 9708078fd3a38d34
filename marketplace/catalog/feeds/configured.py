"""Which live feeds this installation reads: those it has a key for, and a file that it keeps.

List prices never change and are loaded by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from marketplace.catalog.feeds import Feed, hyperstack, lambda_cloud, prime, runpod, shadeform, vast
from marketplace.catalog.feeds.hunted import HuntedFeed
from marketplace.catalog.feeds.local_file import LocalFile
from marketplace.settings import env_text

# What names the key and the address in the environment, the feed, where it is by default.
LIVE: tuple[tuple[str, Callable[[str, str], Feed], str], ...] = (
    ("PRIME", prime.PrimeFeed, prime.BASE_URL),
    ("SHADEFORM", shadeform.ShadeformFeed, shadeform.BASE_URL),
    ("VAST", vast.VastFeed, vast.BASE_URL),
    ("LAMBDA", lambda_cloud.LambdaFeed, lambda_cloud.BASE_URL),
    ("RUNPOD", runpod.RunpodFeed, runpod.BASE_URL),
    ("HYPERSTACK", hyperstack.HyperstackFeed, hyperstack.BASE_URL),
)


def configured_feeds() -> list[Feed]:
    feeds: list[Feed] = [
        feed(key, env_text(f"{name}_API_BASE", base))
        for name, feed, base in LIVE
        if (key := env_text(f"{name}_API_KEY", ""))
    ]
    if env_text("GPUHUNT", "") == "1":
        feeds.append(HuntedFeed())
    path = env_text("CATALOGUE_FILE", "")
    return [*feeds, LocalFile(Path(path))] if path else feeds
