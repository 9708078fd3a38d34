"""The terms of an island as a seller states them: what may be said, and what is wrong with what was said.

Pure. Invariant: all that is wrong is found at once, each by its field; what is not stated is None and never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TypedDict

from marketplace.core.errors import FieldProblem
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR, UUSD_PER_USD

NAME_LENGTH_MAX = 120
GPUS_MAX = 65_536
# A thousand dollars for a GPU and an hour is a typing error.
PRICE_MAX_UUSD_PER_GPU_HOUR = 1_000 * UUSD_PER_USD
LEASE_MAX_MIN = 366 * 24 * 60
MBPS_MAX = 1_000_000
NOTICE_MAX_S = 86_400


class Terms(TypedDict, total=False):
    """What a seller may change later. A key that is absent is left as it is."""

    name: str
    price_uusd_per_gpu_hour: int
    listed: bool
    available_from: datetime
    available_until: datetime | None
    min_lease_min: int
    wan_up_mbps: int | None
    wan_down_mbps: int | None
    preemptible: bool
    preempt_notice_s: int | None


def to_price_step(price_uusd_per_gpu_hour: int) -> int:
    """The nearest price that makes a GPU-minute a whole number of micro-USD: at most 30 micro-USD an hour away."""
    steps = (price_uusd_per_gpu_hour + PRICE_STEP_UUSD_PER_GPU_HOUR // 2) // PRICE_STEP_UUSD_PER_GPU_HOUR
    return max(steps, 1) * PRICE_STEP_UUSD_PER_GPU_HOUR


def problems_of_terms(terms: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """What is wrong with the terms an island would have: `terms` holds all of `Terms`, as they would stand."""
    yield from problems_of_name(terms["name"])
    yield from _price(terms["price_uusd_per_gpu_hour"])
    yield from _within("min_lease_min", terms["min_lease_min"], 1, LEASE_MAX_MIN)
    for name in ("wan_up_mbps", "wan_down_mbps"):
        if terms[name] is not None:
            yield from _within(name, terms[name], 1, MBPS_MAX)
    until = terms["available_until"]
    if until is not None and until <= terms["available_from"]:
        yield FieldProblem("available_until", "must be later than available_from")
    if terms["preempt_notice_s"] is not None:
        if not terms["preemptible"]:
            yield FieldProblem("preempt_notice_s", "is for islands that are preemptible")
        yield from _within("preempt_notice_s", terms["preempt_notice_s"], 0, NOTICE_MAX_S)


def problems_of_size(gpu_count: int, gpus_per_lot: int) -> Iterator[FieldProblem]:
    found = [*_within("gpu_count", gpu_count, 1, GPUS_MAX), *_within("gpus_per_lot", gpus_per_lot, 1, GPUS_MAX)]
    yield from found
    if not found and gpu_count % gpus_per_lot:
        yield FieldProblem("gpus_per_lot", f"{gpu_count} GPUs are no whole number of lots of {gpus_per_lot}")


def problems_of_name(name: str, field: str = "name") -> Iterator[FieldProblem]:
    if not name:
        yield FieldProblem(field, "a name is needed")
    elif len(name) > NAME_LENGTH_MAX:
        yield FieldProblem(field, f"at most {NAME_LENGTH_MAX} characters")
    elif not name.isprintable():
        yield FieldProblem(field, "a name has no control characters")


def clean_name(text: str) -> str:
    return " ".join(text.split())


def _price(price_uusd_per_gpu_hour: int) -> Iterator[FieldProblem]:
    name = "price_uusd_per_gpu_hour"
    found = list(_within(name, price_uusd_per_gpu_hour, 1, PRICE_MAX_UUSD_PER_GPU_HOUR))
    yield from found
    if not found and price_uusd_per_gpu_hour % PRICE_STEP_UUSD_PER_GPU_HOUR:
        nearest = to_price_step(price_uusd_per_gpu_hour)
        yield FieldProblem(name, f"must be a multiple of {PRICE_STEP_UUSD_PER_GPU_HOUR}; the nearest is {nearest}")


def _within(field: str, value: int, least: int, most: int) -> Iterator[FieldProblem]:
    if not least <= value <= most:
        yield FieldProblem(field, f"must be from {least:,} to {most:,}")
