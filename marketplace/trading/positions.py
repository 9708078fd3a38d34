"""The arithmetic of who holds what when: step functions over minutes, and the slots of an island.

Pure. Invariant: everything is [start_min, end_min) in whole UTC minutes, and nothing is changed only looked at; the
services ask here, under the SKU's lock, what may be sold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A change of a step function: `delta` more for [start_min, end_min)."""

    start_min: int
    end_min: int
    delta: int


@dataclass(frozen=True)
class Busy:
    """A slot that is held for [start_min, end_min)."""

    slot: int
    start_min: int
    end_min: int


def levels(steps: Iterable[Step], start_min: int, end_min: int) -> list[Step]:
    """The steps' sum over the window as the fewest pieces of one level each, in order and without a gap."""
    edges: dict[int, int] = {start_min: 0}
    for step in steps:
        low, high = max(step.start_min, start_min), min(step.end_min, end_min)
        if low < high:
            edges[low] = edges.get(low, 0) + step.delta
            edges[high] = edges.get(high, 0) - step.delta
    pieces: list[Step] = []
    level = 0
    bounds = sorted(edge for edge in edges if edge < end_min)
    for edge, after in zip(bounds, [*bounds[1:], end_min], strict=True):
        level += edges[edge]
        if pieces and pieces[-1].delta == level:
            pieces[-1] = Step(pieces[-1].start_min, after, level)
        else:
            pieces.append(Step(edge, after, level))
    return pieces


def lowest(steps: Iterable[Step], start_min: int, end_min: int) -> int:
    """The least of the steps' sum over the minutes of the window."""
    return min(piece.delta for piece in levels(steps, start_min, end_min))


def held_pieces(windows: Iterable[tuple[int, int]]) -> list[Step]:
    """Slots that are each held over a window: how many at a time, without the times at which it is none."""
    steps = [Step(start_min, end_min, 1) for start_min, end_min in windows if start_min < end_min]
    if not steps:
        return []
    first, last = min(step.start_min for step in steps), max(step.end_min for step in steps)
    return [piece for piece in levels(steps, first, last) if piece.delta]


def free_slots(lots: int, busy: Sequence[Busy], start_min: int, end_min: int) -> list[int]:
    """The slots nobody holds in any minute of the window, tightest fit first.

    A slot whose neighbours in time are close is taken first, so that long free stretches stay whole for long leases."""
    taken = {each.slot for each in busy if each.start_min < end_min and each.end_min > start_min}
    return sorted(
        (slot for slot in range(lots) if slot not in taken),
        key=lambda slot: (*_slack(slot, busy, start_min, end_min), slot),
    )


def free_until(lots: int, busy: Sequence[Busy], from_min: int) -> list[int | None]:
    """For each slot that is free in the minute `from_min`: the minute in which it stops being so (None: never)."""
    return [next_start(slot, busy, from_min) for slot in free_slots(lots, busy, from_min, from_min + 1)]


def next_start(slot: int, busy: Iterable[Busy], from_min: int) -> int | None:
    """When the slot is next begun to be held, from `from_min` on."""
    return min(
        (max(each.start_min, from_min) for each in busy if each.slot == slot and each.end_min > from_min), default=None
    )


def earliest(moments: Iterable[int | None]) -> int | None:
    """The first of the minutes, where None is no end."""
    return min((moment for moment in moments if moment is not None), default=None)


def spread(lots: int, start_min: int, end_min: int) -> Iterator[Busy]:
    """Every slot, held."""
    for slot in range(lots):
        yield Busy(slot, start_min, end_min)


def _slack(slot: int, busy: Sequence[Busy], start_min: int, end_min: int) -> tuple[float, float]:
    """The free time that would be left after and before the window."""
    before = max((each.end_min for each in busy if each.slot == slot and each.end_min <= start_min), default=None)
    after = min((each.start_min for each in busy if each.slot == slot and each.start_min >= end_min), default=None)
    return (
        float("inf") if after is None else float(after - end_min),
        float("inf") if before is None else float(start_min - before),
    )
