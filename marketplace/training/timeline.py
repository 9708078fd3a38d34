"""A job's islands as lanes in time: who trained, sent, waited, was refused, and when one left. A picture made here.

Pure. Invariant: every mark lies inside the picture and stands for one row; time runs left to right on one scale for all
lanes, from the job's first place to now or its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

WIDTH = 960
LEFT = 132  # for the lanes' names
RIGHT = 12
TOP = 26  # for the axis
LANE = 30
BAR = 16
# More rounds than this in one picture are a smear: the last ones are shown, and how many are not is said.
ROUNDS_SHOWN = 60
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800)
TICKS = 8

Scale = Callable[[datetime], float]


@dataclass(frozen=True)
class Work:
    """One member's part in one round."""

    member_id: str
    number: int
    opened_at: datetime
    sealed_at: datetime | None
    compute_ms: int | None
    upload_ms: int | None
    submitted_at: datetime | None
    accepted: bool | None
    refused_why: str


@dataclass(frozen=True)
class Place:
    """One member's time on its lease."""

    member_id: str
    name: str
    joined_at: datetime | None
    created_at: datetime
    gone_at: datetime | None
    gone_why: str


@dataclass(frozen=True)
class Bar:
    kind: str  # train | send | wait | refused
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Lane:
    name: str
    y: int
    from_x: float
    to_x: float
    bars: tuple[Bar, ...]
    gone_x: float | None
    gone_why: str

    @property
    def text_y(self) -> int:
        return self.y + BAR - 4

    @property
    def line_y(self) -> int:
        return self.y + BAR // 2


@dataclass(frozen=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True)
class Timeline:
    width: int
    height: int
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    seals: tuple[Tick, ...]
    rounds_hidden: int


def timeline_of(
    places: Sequence[Place], works: Sequence[Work], *, now: datetime, rounds_before: int = 0
) -> Timeline | None:
    """None while there is nothing to show. `rounds_before`: how many there were before those given."""
    if not places:
        return None
    numbers = sorted({work.number for work in works})
    shown = set(numbers[-ROUNDS_SHOWN:])
    hidden = rounds_before + len(numbers) - len(shown)
    drawn = [work for work in works if work.number in shown]
    start = min(place.created_at for place in places)
    if hidden and drawn:
        start = min(work.opened_at for work in drawn)
        places = [place for place in places if place.gone_at is None or place.gone_at > start]
    end = max(now, start + timedelta(seconds=1))
    span_s = (end - start).total_seconds()

    def x(at: datetime) -> float:
        share = min(1.0, max(0.0, (at - start).total_seconds() / span_s))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    lanes = []
    for row, place in enumerate(places):
        bars = [bar for work in drawn if work.member_id == place.member_id for bar in _bars(work, place, end, x)]
        lanes.append(
            Lane(
                name=place.name,
                y=TOP + row * LANE,
                from_x=x(place.created_at),
                to_x=x(place.gone_at or end),
                bars=tuple(bars),
                gone_x=None if place.gone_at is None else x(place.gone_at),
                gone_why=place.gone_why,
            )
        )
    sealed = {work.number: work.sealed_at for work in drawn if work.sealed_at is not None}
    return Timeline(
        width=WIDTH,
        height=TOP + len(lanes) * LANE + 4,
        lanes=tuple(lanes),
        ticks=tuple(Tick(x(start + timedelta(seconds=at_s)), clock(at_s)) for at_s in _marks(span_s)),
        seals=tuple(Tick(x(at), f"round {number} sealed") for number, at in sorted(sealed.items())),
        rounds_hidden=hidden,
    )


def _bars(work: Work, place: Place, end: datetime, at: Scale) -> list[Bar]:
    """Training, sending and waiting follow each other; what is not reported yet is training still."""
    until = min(work.sealed_at or end, place.gone_at or end)
    if work.opened_at >= until:
        return []
    words = f"round {work.number}"
    if work.submitted_at is None:
        refused = work.accepted is False
        kind, title = ("refused", f"{words}: {work.refused_why}") if refused else ("train", f"{words}: training")
        return [_bar(kind, work.opened_at, until, title, at)]
    sent_at = min(work.submitted_at, until)
    send_from = max(work.opened_at, sent_at - timedelta(milliseconds=work.upload_ms or 0))
    trained_at = send_from
    if work.compute_ms is not None:
        trained_at = min(send_from, work.opened_at + timedelta(milliseconds=work.compute_ms))
    if work.accepted is False:
        return [_bar("refused", work.opened_at, until, f"{words}: refused, {work.refused_why}", at)]
    return [
        _bar("train", work.opened_at, max(trained_at, work.opened_at), f"{words}: trained", at),
        _bar("send", send_from, sent_at, f"{words}: sent", at),
        _bar("wait", sent_at, until, f"{words}: waited", at),
    ]


def _bar(kind: str, begin: datetime, end: datetime, title: str, at: Scale) -> Bar:
    first, last = at(begin), at(end)
    return Bar(kind, first, round(max(last - first, 0.5), 1), title)


def _marks(span_s: float) -> list[int]:
    longest = STEPS_S[-1] * math.ceil(span_s / TICKS / STEPS_S[-1])
    step = next((each for each in STEPS_S if span_s / each <= TICKS), longest)
    return list(range(0, int(span_s) + 1, step))


def clock(seconds: int) -> str:
    """ "2:05", "1:02:05", "9 d", "9 d 6 h": time since the start."""
    if seconds >= 2 * 86_400:
        days, rest = divmod(seconds, 86_400)
        return f"{days} d {rest // 3600} h" if rest >= 3600 else f"{days} d"
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def spark(values: Sequence[float], *, width: int = 120, height: int = 28) -> str:
    """The `d` of a path through the values, lowest at the bottom; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - 4) / (len(values) - 1)
    points = [
        f"{2 + index * step:.1f} {2 + (high - value) / span * (height - 4):.1f}" for index, value in enumerate(values)
    ]
    return "M" + "L".join(points)
