"""The picture of a lease: how many GPUs it holds in each minute, as a step function in SVG coordinates.

Pure. Invariant: integers in, integers out; what is drawn is what the contracts say, nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marketplace.trading.positions import Step, levels

WIDTH = 1_000
HEIGHT = 100
HEADROOM = 8  # so that the line at the top is not cut


@dataclass(frozen=True)
class WindowChart:
    area: str  # path of what is held
    sold_on: str  # path of what others hold of it, on top of what is held; "" where nothing was sold
    given_back: str  # path of what was bought and given back; "" where nothing was
    now_x: int | None  # None: now lies outside, or does not matter any more
    most: int
    summary: str  # for who cannot see it


def window_chart(
    bought: Sequence[Step],
    sold_on: Sequence[Step],
    given_back: Sequence[Step],
    start_min: int,
    end_min: int,
    now_min: int | None,
) -> WindowChart:
    """What was bought, sold on and given back in GPUs, all positive; the window is all that was ever bought."""
    most = max(piece.delta for piece in levels(bought, start_min, end_min))
    gone = [*given_back, *sold_on]
    held = [*bought, *(Step(each.start_min, each.end_min, -each.delta) for each in gone)]
    pieces = levels(held, start_min, end_min)
    span = end_min - start_min

    def x_of(minute: int) -> int:
        return (minute - start_min) * WIDTH // span

    def y_of(gpus: int) -> int:
        return HEIGHT - gpus * (HEIGHT - HEADROOM) // most

    def between(steps: Sequence[Step], below: Sequence[Step]) -> str:
        """Where `steps` lie on top of `below`."""
        path = ""
        for piece in levels(below, start_min, end_min):
            for part in levels(steps, piece.start_min, piece.end_min):
                if part.delta:
                    top, bottom = y_of(piece.delta + part.delta), y_of(piece.delta)
                    path += f"M{x_of(part.start_min)} {top}H{x_of(part.end_min)}V{bottom}H{x_of(part.start_min)}Z"
        return path

    kept = "".join(f"L{x_of(p.start_min)} {y_of(p.delta)}L{x_of(p.end_min)} {y_of(p.delta)}" for p in pieces)
    sold = between(sold_on, held)
    returned = between(given_back, [*held, *sold_on])
    words = "; ".join(f"{p.delta} GPUs for {p.end_min - p.start_min} minutes" for p in pieces)
    now_x = x_of(now_min) if now_min is not None and start_min <= now_min <= end_min else None
    return WindowChart(f"M0 {HEIGHT}{kept}L{WIDTH} {HEIGHT}Z", sold, returned, now_x, most, words)
