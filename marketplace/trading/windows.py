"""What a buyer asks for, in whole minutes: snapped to what can be held, and everything wrong with it by its field.

Pure. Invariant: a window is never shorter than asked: its first minute is the one in which the start falls, its last
the one in which the end falls. Without a start it begins with the minute in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from marketplace.core.clock import minute_of, minute_start
from marketplace.core.errors import Conflict, FieldProblem, InvalidInput, Problem
from marketplace.core.money import MAX_AMOUNT_UUSD, format_usd, window_cost_uusd
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Lease

# A year and a day: further ahead a price is a guess.
WINDOW_MAX_MIN = 366 * 24 * 60
AHEAD_MAX_MIN = 366 * 24 * 60
NOT_AVAILABLE = "not_available"
PRICE_CHANGED = "price_changed"
# Where nobody should buy more, though what is held is kept.
NO_MORE = (IslandState.LOST, IslandState.DRAINING, IslandState.RETIRED)


@dataclass(frozen=True)
class Window:
    start_min: int
    end_min: int

    @property
    def minutes(self) -> int:
        return self.end_min - self.start_min


def whole_minutes_until(moment: datetime) -> int:
    """The first minute that does not begin before `moment`."""
    minute = minute_of(moment)
    return minute if minute_start(minute) == moment else minute + 1


def snapped(start_at: datetime | None, end_at: datetime, now: datetime) -> Window:
    """The minutes of [start_at, end_at), or InvalidInput naming what is wrong."""
    now_min = minute_of(now)
    start_min = now_min if start_at is None else minute_of(start_at)
    end_min = whole_minutes_until(end_at)
    problems = []
    if start_min < now_min:
        problems.append(FieldProblem("start_at", "is in the past; leave it out to begin now"))
    elif start_min > now_min + AHEAD_MAX_MIN:
        problems.append(FieldProblem("start_at", "is more than a year ahead"))
    if end_min <= start_min:
        problems.append(FieldProblem("end_at", "must be later than the start"))
    elif end_min - start_min > WINDOW_MAX_MIN:
        problems.append(FieldProblem("end_at", "must be within a year of the start"))
    if problems:
        raise InvalidInput("the window cannot be rented", fields=problems)
    return Window(start_min, end_min)


def check_size(island: Island, gpus: int, window: Window) -> int:
    """What `gpus` for the window costs at the island's price; InvalidInput where the island cannot be had so."""
    problems = list(_problems_of_size(island, gpus, window))
    cost_uusd = window_cost_uusd(island.price_uusd_per_gpu_hour, max(gpus, 0), window.minutes)
    if cost_uusd > MAX_AMOUNT_UUSD:
        problems.append(FieldProblem("end_at", f"costs {format_usd(cost_uusd)}: more than can be held at once"))
    if problems:
        raise InvalidInput("this cannot be rented", fields=problems)
    return cost_uusd


def check_offered(island: Island, window: Window, now: datetime) -> None:
    """Whether the island is on offer for the window, whatever others hold of it; else Conflict."""
    if island.state == IslandState.RETIRED:
        raise Conflict.at("island_id", "this island was retired by its owner", code=NOT_AVAILABLE)
    if not island.listed:
        raise Conflict.at("island_id", "its owner takes no new leases at present", code=NOT_AVAILABLE)
    if window.start_min <= minute_of(now) and island.state != IslandState.ONLINE:
        state = island.get_state_display().lower()
        raise Conflict.at("island_id", f"it cannot begin now, the island is not online ({state})", code=NOT_AVAILABLE)
    if window.start_min < minute_of(island.available_from):
        opens = _utc(island.available_from)
        raise Conflict.at("start_at", f"the island is offered from {opens}", code=NOT_AVAILABLE)
    check_offered_until(island, window.end_min)


def check_offered_until(island: Island, end_min: int) -> None:
    closes_min = offered_until_min(island)
    if closes_min is not None and end_min > closes_min:
        raise Conflict.at("end_at", f"the island is offered until {_utc(minute_start(closes_min))}", code=NOT_AVAILABLE)


def check_extension(lease: Lease, island: Island, end_min: int) -> None:
    """Whether the island would take `lease` until `end_min`, whatever others hold of it; else the typed refusal."""
    if end_min < lease.end_min:
        raise InvalidInput.at("end_at", "is before the lease's end; end it instead to give minutes back")
    if end_min - lease.start_min > WINDOW_MAX_MIN:
        raise InvalidInput.at("end_at", "must be within a year of the start")
    cost_uusd = window_cost_uusd(lease.price_uusd_per_gpu_hour, lease.gpus, end_min - lease.start_min)
    if cost_uusd > MAX_AMOUNT_UUSD:
        raise InvalidInput.at("end_at", f"costs {format_usd(cost_uusd)}: more than can be held at once")
    if lease.upstream_id is not None:
        raise Conflict.at("end_at", "it was bought of another holder, whose hours end there", code=NOT_AVAILABLE)
    if not island.listed or island.state in NO_MORE or lease.sku.retired_at is not None:
        raise Conflict.at("end_at", "the island takes no more of this lease", code=NOT_AVAILABLE)
    check_price(island, lease.price_uusd_per_gpu_hour, "end_at")
    check_offered_until(island, end_min)


def may_extend(lease: Lease, island: Island) -> bool:
    """Whether a minute more would be taken, as far as it hangs on the island."""
    try:
        check_extension(lease, island, lease.end_min + 1)
    except Problem:
        return False
    return True


def check_price(island: Island, most_uusd_per_gpu_hour: int | None, field: str) -> None:
    if most_uusd_per_gpu_hour is not None and island.price_uusd_per_gpu_hour > most_uusd_per_gpu_hour:
        asked, most = format_usd(island.price_uusd_per_gpu_hour, 3), format_usd(most_uusd_per_gpu_hour, 3)
        raise Conflict.at(field, f"the price is {asked} per GPU-hour, above {most}", code=PRICE_CHANGED)


def free_in_words(gpus: int) -> str:
    if gpus == 0:
        return "no GPU is free over the whole window"
    return f"only {gpus} GPU{'s are' if gpus > 1 else ' is'} free over the whole window"


def offered_until_min(island: Island) -> int | None:
    """The last minute's end, rounded down: what is not wholly offered is not sold."""
    return None if island.available_until is None else minute_of(island.available_until)


def _problems_of_size(island: Island, gpus: int, window: Window) -> Iterator[FieldProblem]:
    if gpus < 1:
        yield FieldProblem("gpus", "at least one")
    elif gpus > island.gpu_count:
        yield FieldProblem("gpus", f"the island has {island.gpu_count}")
    elif gpus % island.gpus_per_lot:
        yield FieldProblem("gpus", f"are rented {island.gpus_per_lot} together: give a multiple of it")
    if window.minutes < island.min_lease_min:
        yield FieldProblem("end_at", f"the shortest lease of this island is {island.min_lease_min} minutes")


def _utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
