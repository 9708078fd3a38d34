"""State changes as compare-and-swap: a row moves only from the state the caller saw.

Invariant: no `.save()` writes a state. `advance` is one UPDATE guarded by the old state; zero rows means somebody else
was first, and the caller decides whether that is a conflict or old news.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from marketplace.core.errors import Conflict

M = TypeVar("M", bound=Model)


class Machine:
    """The allowed moves of one kind of row."""

    def __init__(self, name: str, moves: Mapping[str, set[str]]) -> None:
        self.name = name
        self.moves = {state: frozenset(targets) for state, targets in moves.items()}
        unknown = {target for targets in moves.values() for target in targets} - set(moves)
        if unknown:
            raise ValueError(f"{name}: moves to unknown states {sorted(unknown)}")

    def sources_of(self, target: str) -> list[str]:
        return sorted(state for state, targets in self.moves.items() if target in targets)

    @property
    def terminal(self) -> frozenset[str]:
        return frozenset(state for state, targets in self.moves.items() if not targets)

    def try_advance(self, rows: QuerySet[M], to: str, **fields: Any) -> int:
        """Move every row of `rows` that may move to `to`; returns how many did."""
        return rows.filter(state__in=self.sources_of(to)).update(state=to, **fields)

    def advance(self, rows: QuerySet[M], to: str, **fields: Any) -> None:
        """Move exactly one row, or raise Conflict naming the machine."""
        if self.try_advance(rows, to, **fields) != 1:
            raise Conflict(f"this {self.name} can no longer become {to}", code="state_changed")
