"""Raw listings to comparable ones: GPU names to canonical ids, prices to integer micro-USD, stock to a lower bound.

Pure (standard library only). Invariant: what a source does not state stays None, and what we assume is said in a flag;
nothing is guessed silently. Money is rounded once, half-even, after the division by the number of GPUs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

UUSD_PER_USD = 1_000_000
# A source prints VRAM in GB or GiB, and up to 7 % off what is soldered on the card (22.5 for 24).
VRAM_TOLERANCE = Decimal("0.08")
# Above this a price is a typing error, and beyond what a bigint of micro-USD can be summed over.
MAX_USD = Decimal(1_000_000)

VENDOR_WORDS = {"nvidia", "amd", "intel", "geforce"}
# How sources spell the socket or the link; None of these is a form factor by itself ("NVLink" can be SXM or a bridge).
LINKS = {"sxm": "sxm", "sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "pcie": "pcie", "nvl": "nvl"}


@dataclass(frozen=True)
class Alias:
    """One spelling seen in public and the GPU it means."""

    raw_name: str
    raw_vram_gib: Decimal | None
    raw_link: str
    gpu: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """The canonical GPU of a listing, and what had to be assumed to say so."""

    gpu: str
    flags: tuple[str, ...] = ()


def name_key(raw_name: str) -> str:
    """What two spellings of one name have in common: "NVIDIA GeForce RTX_4090" is "rtx4090"."""
    words = re.split(r"[^a-z0-9.]+", raw_name.lower())
    return "".join(word for word in words if word not in VENDOR_WORDS)


def link_key(raw_link: str | None) -> str:
    """ "SXM5" is "sxm"; a link we do not know is kept as it is written."""
    squashed = re.sub(r"[^a-z0-9]", "", (raw_link or "").lower())
    return LINKS.get(squashed, squashed)


def form_key(raw_name: str, raw_link: str | None) -> tuple[str, str]:
    """A name without the words of its form, and the form, which sources print in either place: "H100 SXM5" and "H100"
    with the link "SXM5" are both ("h100", "sxm")."""
    words = re.split(r"[^A-Za-z0-9.]+", raw_name)
    forms = [word for word in words if word.lower() in LINKS]
    bare = " ".join(word for word in words if word not in forms)
    return name_key(bare), link_key(forms[0] if forms else raw_link)


class AliasTable:
    """All spellings we know, asked for the GPU of a listing."""

    def __init__(self, aliases: Iterable[Alias]) -> None:
        self._exact: dict[tuple[str, Decimal | None, str], Alias] = {}
        self._by_name: dict[tuple[str, str], list[Alias]] = {}
        for alias in aliases:
            key = _exact_key(alias.raw_name, alias.raw_vram_gib, alias.raw_link)
            known = self._exact.setdefault(key, alias)
            if known.gpu != alias.gpu:
                raise ValueError(f"{alias.raw_name!r} means both {known.gpu} and {alias.gpu}")
            self._by_name.setdefault(form_key(alias.raw_name, alias.raw_link), []).append(alias)

    def find(self, raw_name: str, vram_gib: Decimal | None, raw_link: str | None) -> Match | None:
        """The GPU of a listing; None when no spelling we know fits, which a person has to look at.

        1. The spelling as it was seen before, with its VRAM and link.
        2. The same name and link with VRAM within the tolerance of one GPU: `vram_rounded`. A listing that states no
           VRAM, or a VRAM that two GPUs could mean, has no answer.
        """
        exact = self._exact.get(_exact_key(raw_name, vram_gib, raw_link or ""))
        if exact is not None:
            return Match(exact.gpu, exact.flags)
        if vram_gib is None:
            return None
        near = [
            alias
            for alias in self._by_name.get(form_key(raw_name, raw_link), [])
            if _close(alias.raw_vram_gib, vram_gib)
        ]
        if len({alias.gpu for alias in near}) != 1:
            return None
        nearest = min(near, key=lambda alias: abs((alias.raw_vram_gib or Decimal(0)) - vram_gib))
        same = nearest.raw_vram_gib == vram_gib
        return Match(nearest.gpu, nearest.flags if same else (*nearest.flags, "vram_rounded"))


def _close(known: Decimal | None, stated: Decimal) -> bool:
    return known is not None and abs(known - stated) <= known * VRAM_TOLERANCE


def _exact_key(raw_name: str, vram_gib: Decimal | None, raw_link: str) -> tuple[str, Decimal | None, str]:
    return raw_name.strip().lower(), vram_gib, raw_link.strip().lower()


def decimal_or_none(text: str | int | Decimal | None) -> Decimal | None:
    """A number as a source states it. Nothing, or what is no finite number, is None: never zero."""
    if text is None or isinstance(text, bool):
        return None
    try:
        value = Decimal(text.strip() if isinstance(text, str) else text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def price_uusd_per_gpu_hour(usd: str | int | Decimal | None, gpus: int = 1) -> int | None:
    """Dollars for `gpus` GPUs and an hour to micro-USD per GPU-hour.

    Takes decimals and decimal text, never a float: "1.6567999999999998" is what a source's own floats made of 1.6568,
    and rounding to the micro-USD brings it back. Missing, negative or absurd is None; a stated 0 is 0 (and screened out
    elsewhere, with its reason).
    """
    if gpus < 1:
        raise ValueError("a price is for at least one GPU")
    value = decimal_or_none(usd)
    if value is None or value < 0 or value > MAX_USD:
        return None
    return int((value * UUSD_PER_USD / gpus).to_integral_value(rounding=ROUND_HALF_EVEN))


STOCK_WORDS: Mapping[str, int] = {
    "unavailable": 0,
    "none": 0,
    "low": 1,
    "medium": 1,
    "high": 1,
    "available": 1,
}


def stock_lower_bound(raw: str | int | None) -> int | None:
    """How many are there at least: "200+" is 200, "Low" is 1. What is not stated is None."""
    text = str(raw).strip().lower() if raw is not None else ""
    number = re.fullmatch(r"(\d{1,9})\+?", text)
    return int(number.group(1)) if number else STOCK_WORDS.get(text)


def offer_uid(channel: str, upstream_sku: str, region: str, gpus: int, pricing_model: str, tier: str) -> str:
    """The identity of an offer over time. Never of its price: a new price is the same offer with a history."""
    parts = (channel, upstream_sku, region, str(gpus), pricing_model, tier)
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()
