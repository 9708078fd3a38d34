"""What a person asks for in an order, checked and snapped to what can be held.

Invariant: everything wrong is said at once, each by its field; an order that comes out of here can be matched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from marketplace.accounts.models import Organisation
from marketplace.catalog.models import GpuModel
from marketplace.core.errors import FieldProblem, InvalidInput, Problem
from marketplace.core.money import MAX_AMOUNT_UUSD, PRICE_STEP_UUSD_PER_GPU_HOUR, format_usd, window_cost_uusd
from marketplace.fleet.models import Island
from marketplace.trading.models import Colocation, Order, Tif, order_id
from marketplace.trading.windows import Window, snapped

GPUS_MAX = 100_000
# As in matching: a rest or a part shorter than an hour is worth little to anybody.
MIN_BLOCK_MIN = 60


@dataclass(frozen=True)
class Wanted:
    """One of `island_id` and `gpu`. `start_at` None: now. `duration_min`: a block of that length within the window.
    `quorum_gpus` makes it a basket: so many over several islands or none, beyond it as many as the limit bears."""

    gpus: int
    end_at: datetime
    limit_uusd_per_gpu_hour: int
    island_id: str | None = None
    gpu: str | None = None
    start_at: datetime | None = None
    duration_min: int | None = None
    gpus_per_lot: int = 1
    tif: str = Tif.GTC
    colocation: str = Colocation.SAME_ISLAND
    quorum_gpus: int | None = None
    min_gpus_per_island: int | None = None
    allow_partial_gpus: bool = False
    allow_partial_time: bool = False
    min_block_min: int = MIN_BLOCK_MIN
    expires_at: datetime | None = None


def order_of(organisation: Organisation, wanted: Wanted, *, key: str, by: str, now: datetime) -> Order:
    """The order, not saved; InvalidInput with every field that is wrong."""
    problems: list[FieldProblem] = []
    island = _island(wanted, problems)
    gpu = _gpu(wanted, problems)
    lot = wanted.gpus_per_lot if island is None else island.gpus_per_lot
    window = _window(wanted, now, problems)
    problems += _problems(wanted, lot, window, now)
    if island is not None and island.organisation_id == organisation.pk:
        problems.append(FieldProblem("island_id", "is your own: nobody trades with themselves"))
    if problems or window is None:
        raise InvalidInput(problems[0].message if len(problems) == 1 else "some fields are not right", fields=problems)
    return Order(
        id=key,
        organisation=organisation,
        island=island,
        gpu=gpu,
        gpus_per_lot=lot,
        gpus=wanted.gpus,
        start_min=window.start_min,
        end_min=window.end_min,
        duration_min=wanted.duration_min,
        limit_uusd_per_gpu_hour=wanted.limit_uusd_per_gpu_hour,
        tif=wanted.tif,
        colocation=wanted.colocation,
        quorum_gpus=wanted.quorum_gpus,
        min_gpus_per_island=None if wanted.quorum_gpus is None else wanted.min_gpus_per_island or lot,
        allow_partial_gpus=wanted.allow_partial_gpus,
        allow_partial_time=wanted.allow_partial_time,
        min_block_min=wanted.min_block_min,
        expires_at=wanted.expires_at,
        wanted=[[wanted.gpus, window.start_min, window.end_min, None]],
        created_by=by,
        created_at=now,
    )


UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Change:
    """What an amended order says otherwise. None as `expires_at` is: no end."""

    limit_uusd_per_gpu_hour: int | None = None
    expires_at: datetime | str | None = UNCHANGED


def replacement(old: Order, change: Change, *, by: str, now: datetime) -> Order:
    """The order, not saved, that takes the place of what is left of `old`; InvalidInput with every field that is
    wrong."""
    limit = old.limit_uusd_per_gpu_hour if change.limit_uusd_per_gpu_hour is None else change.limit_uusd_per_gpu_hour
    expires_at = change.expires_at if isinstance(change.expires_at, datetime) else None
    if change.expires_at == UNCHANGED:
        expires_at = old.expires_at
    problems = []
    if limit < PRICE_STEP_UUSD_PER_GPU_HOUR or limit % PRICE_STEP_UUSD_PER_GPU_HOUR:
        problems.append(FieldProblem("limit_uusd_per_gpu_hour", f"a multiple of {PRICE_STEP_UUSD_PER_GPU_HOUR}"))
    if expires_at is not None and expires_at <= now:
        problems.append(FieldProblem("expires_at", "must be in the future"))
    if change.limit_uusd_per_gpu_hour is None and change.expires_at == UNCHANGED:
        problems.append(FieldProblem("limit_uusd_per_gpu_hour", "say what shall be otherwise"))
    if problems:
        raise InvalidInput(problems[0].message if len(problems) == 1 else "some fields are not right", fields=problems)
    new = Order.objects.get(pk=old.pk)
    new.pk, new.replaces, new.holds = order_id(), old, 0
    new.limit_uusd_per_gpu_hour, new.expires_at = limit, expires_at
    new.created_by, new.created_at = by, now
    if old.wanted:
        new.gpus, new.start_min, new.end_min = old.wanted[0][:3]
    new._state.adding = True
    return new


def _island(wanted: Wanted, problems: list[FieldProblem]) -> Island | None:
    if (wanted.island_id is None) == (wanted.gpu is None):
        problems.append(FieldProblem("island_id", "name an island, or a GPU for any island that has it"))
        return None
    if wanted.island_id is None:
        return None
    island = Island.objects.select_related("organisation", "gpu").filter(pk=wanted.island_id).first()
    if island is None:
        problems.append(FieldProblem("island_id", "there is no such island"))
    elif wanted.gpus > island.gpu_count:
        problems.append(FieldProblem("gpus", f"the island has {island.gpu_count}"))
    return island


def _gpu(wanted: Wanted, problems: list[FieldProblem]) -> GpuModel | None:
    if wanted.gpu is None:
        return None
    gpu = GpuModel.objects.filter(pk=wanted.gpu).first()
    if gpu is None:
        problems.append(FieldProblem("gpu", f"{wanted.gpu!r} is no GPU we know; see /api/v1/gpus"))
    return gpu


def _window(wanted: Wanted, now: datetime, problems: list[FieldProblem]) -> Window | None:
    try:
        return snapped(wanted.start_at, wanted.end_at, now)
    except Problem as problem:
        problems += problem.fields
        return None


def _problems(wanted: Wanted, lot: int, window: Window | None, now: datetime) -> Iterator[FieldProblem]:
    if not 1 <= wanted.gpus <= GPUS_MAX:
        yield FieldProblem("gpus", f"from 1 to {GPUS_MAX:,}")
    elif lot < 1:
        yield FieldProblem("gpus_per_lot", "at least one")
    elif wanted.gpus % lot:
        yield FieldProblem("gpus", f"are rented {lot} together: give a multiple of it")
    limit = wanted.limit_uusd_per_gpu_hour
    if limit < PRICE_STEP_UUSD_PER_GPU_HOUR or limit % PRICE_STEP_UUSD_PER_GPU_HOUR:
        yield FieldProblem("limit_uusd_per_gpu_hour", f"a multiple of {PRICE_STEP_UUSD_PER_GPU_HOUR}")
    if wanted.tif not in Tif.values:
        yield FieldProblem("tif", f"one of {', '.join(Tif.values)}")
    if wanted.colocation not in Colocation.values:
        yield FieldProblem("colocation", f"one of {', '.join(Colocation.values)}")
    if wanted.min_block_min < 1:
        yield FieldProblem("min_block_min", "at least one")
    if wanted.expires_at is not None and wanted.expires_at <= now:
        yield FieldProblem("expires_at", "must be in the future")
    if wanted.tif == Tif.FOK and (wanted.allow_partial_gpus or wanted.allow_partial_time):
        yield FieldProblem("tif", "all or nothing allows no part")
    yield from _problems_of_basket(wanted)
    if window is not None:
        yield from _problems_of_length(wanted, window)


def _problems_of_basket(wanted: Wanted) -> Iterator[FieldProblem]:
    if wanted.quorum_gpus is None:
        if wanted.min_gpus_per_island is not None:
            yield FieldProblem("min_gpus_per_island", "is for a basket: give its quorum_gpus")
        return
    if not 1 <= wanted.quorum_gpus <= wanted.gpus:
        yield FieldProblem("quorum_gpus", "from 1 to gpus")
    if wanted.min_gpus_per_island is not None and not 1 <= wanted.min_gpus_per_island <= wanted.gpus:
        yield FieldProblem("min_gpus_per_island", "from 1 to gpus")
    if wanted.gpu is None:
        yield FieldProblem("quorum_gpus", "a basket is of several islands: name a GPU and no island")
    if wanted.allow_partial_gpus or wanted.allow_partial_time or wanted.duration_min is not None:
        yield FieldProblem("quorum_gpus", "a basket is elastic in its GPUs and in nothing else")


def _problems_of_length(wanted: Wanted, window: Window) -> Iterator[FieldProblem]:
    if wanted.duration_min is not None and not 1 <= wanted.duration_min <= window.minutes:
        yield FieldProblem("duration_min", "must lie within the window")
    elif wanted.duration_min is not None and wanted.allow_partial_time:
        yield FieldProblem("duration_min", "a block has no parts in time")
    elif wanted.gpus > 0 and wanted.limit_uusd_per_gpu_hour % PRICE_STEP_UUSD_PER_GPU_HOUR == 0:
        minutes = wanted.duration_min or window.minutes
        most = window_cost_uusd(wanted.limit_uusd_per_gpu_hour, wanted.gpus, minutes)
        if most > MAX_AMOUNT_UUSD:
            yield FieldProblem("end_at", f"can cost {format_usd(most)}: more than can be held at once")
