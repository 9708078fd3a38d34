"""Where the layers above take part in a sync: what an island is to do now, and who is told what its agent said.

Invariant: fleet imports nothing of what is above it; trading and training register here when Django starts. Everything
registered runs inside the sync's transaction: what an agent is told was durable before it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from marketplace.fleet.models import Agent, Island
from worker_agent.protocol import Assignment, ProcessReport, UsageRecord

AssignmentsFor = Callable[[Island, datetime], list[Assignment]]
BeatSink = Callable[[Agent, datetime], None]
UsageSink = Callable[[Agent, Sequence[UsageRecord], datetime], None]
ProcessSink = Callable[[Agent, Sequence[ProcessReport], datetime], None]
# What holds GPUs of the island now or later, each in words ("lease lse_01..."): it cannot be retired under them.
HoldersOf = Callable[[Island, datetime], list[str]]

# A section of an island's page: what its template is given.
SectionOf = Callable[[Island, datetime], dict[str, Any]]

_assignments: list[AssignmentsFor] = []
_beats: list[BeatSink] = []
_usage: list[UsageSink] = []
_processes: list[ProcessSink] = []
_holders: list[HoldersOf] = []
_sections: dict[str, SectionOf] = {}


def register(
    *,
    assignments: AssignmentsFor | None = None,
    beat: BeatSink | None = None,
    usage: UsageSink | None = None,
    processes: ProcessSink | None = None,
    holders: HoldersOf | None = None,
) -> None:
    """Add to what a sync does. A beat is observed first, then usage, then processes, then the assignments are read."""
    if assignments is not None and assignments not in _assignments:
        _assignments.append(assignments)
    if beat is not None and beat not in _beats:
        _beats.append(beat)
    if usage is not None and usage not in _usage:
        _usage.append(usage)
    if processes is not None and processes not in _processes:
        _processes.append(processes)
    if holders is not None and holders not in _holders:
        _holders.append(holders)


def observe_beat(agent: Agent, now: datetime) -> None:
    for sink in _beats:
        sink(agent, now)


def take_usage(agent: Agent, records: Sequence[UsageRecord], now: datetime) -> None:
    for sink in _usage:
        sink(agent, records, now)


def take_processes(agent: Agent, reports: Sequence[ProcessReport], now: datetime) -> None:
    for sink in _processes:
        sink(agent, reports, now)


def assignments_for(island: Island, now: datetime) -> list[Assignment]:
    """All the island is to do now, ordered by id."""
    found = [assignment for source in _assignments for assignment in source(island, now)]
    return sorted(found, key=lambda assignment: assignment.id)


def holders_of(island: Island, now: datetime) -> list[str]:
    return [words for source in _holders for words in source(island, now)]


@dataclass(frozen=True)
class Section:
    """Part of an island's page that a layer above knows: its template, given `section`."""

    template: str
    section: dict[str, Any]


def register_section(template: str, provider: SectionOf) -> None:
    _sections[template] = provider


def sections_of(island: Island, now: datetime) -> list[Section]:
    return [Section(template, provider(island, now)) for template, provider in _sections.items()]
