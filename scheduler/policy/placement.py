"""The first policy: each job gets the fastest set of islands whose whole run its budget can pay.

The algorithm, one tick:

1. Jobs are taken by deadline, then by how long they wait, then by id.
2. What a job holds stays (hysteresis is worth more than a slightly better set); only a seat whose island is lost is
   released.
3. Candidate islands are those whose free GPUs hold the model, of an allowed type, ordered by tokens per second per
   dollar. They are added one by one while the run gets faster and its cost to finish stays inside the free budget,
   up to `max_islands`. Below `min_islands` nothing is taken at all: all or none.
4. Leases near their end are extended, never past the money: a lease is taken for at most the minutes the free budget
   pays, so that what is committed never exceeds it.

Invariant: over one call no GPU is given twice, and for each job the sum of all windows taken is within its free budget.
The optimal policy replaces `decide` behind the same signature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.policy.state import Decision, Extend, Gpu, Island, Job, Market, Place, Release, Seat, Wait
from scheduler.policy.throughput import Replica, effective_tokens_per_s, fits_memory, model_tokens_per_s

# Money kept for the minutes between two ticks and for a slower finish than predicted.
COST_MARGIN = 1.05


def minute_cost_uusd(price_uusd_per_gpu_hour: int, gpus: int) -> int:
    """Exact: prices are multiples of 60."""
    return price_uusd_per_gpu_hour // 60 * gpus


def dollars(amount_uusd: float) -> str:
    return f"${amount_uusd / 1e6:,.2f}"


@dataclass(frozen=True)
class Option:
    """One island a job holds or could take: its speed, its price, and for how long."""

    island_id: str
    gpus: int
    price_uusd_per_gpu_hour: int
    replica: Replica
    until_min: int | None

    @property
    def uusd_per_min(self) -> int:
        return minute_cost_uusd(self.price_uusd_per_gpu_hour, self.gpus)

    @property
    def worth(self) -> float:
        """Tokens per second per dollar an hour; a free island comes first."""
        return self.replica.tokens_per_s / max(self.uusd_per_min, 1)


@dataclass(frozen=True)
class Plan:
    """A set of islands for one job, with what it would do from now on."""

    options: tuple[Option, ...]
    tokens_per_s: float
    minutes_to_finish: float

    @property
    def uusd_per_min(self) -> int:
        return sum(option.uusd_per_min for option in self.options)

    @property
    def cost_to_finish_uusd(self) -> float:
        return self.uusd_per_min * self.minutes_to_finish * COST_MARGIN


def plan_of(job: Job, options: Iterable[Option]) -> Plan:
    chosen = tuple(options)
    speed = effective_tokens_per_s(
        [option.replica for option in chosen],
        parameters=job.parameters,
        batch_tokens=job.batch_tokens,
        inner_steps=job.inner_steps,
        bits_per_parameter=job.bits_per_parameter,
    )
    return Plan(chosen, speed, job.tokens_left / speed / 60 if speed > 0 else math.inf)


def decide(market: Market) -> list[Decision]:
    """All decisions of one tick. See the module for the algorithm and its invariant."""
    gpus = {gpu.id: gpu for gpu in market.gpus}
    islands = {island.id: island for island in market.islands}
    free = {island.id: island.free_gpus for island in market.islands}
    decisions: list[Decision] = []
    for job in sorted(market.jobs, key=_urgency):
        held = [seat for seat in market.seats if seat.job_id == job.id]
        decisions.extend(_decide_job(market, job, held, gpus, islands, free))
    return decisions


def _urgency(job: Job) -> tuple[float, int, str]:
    return (math.inf if job.deadline_min is None else job.deadline_min, job.waiting_since_min, job.id)


def _decide_job(
    market: Market,
    job: Job,
    seats: list[Seat],
    gpus: dict[str, Gpu],
    islands: dict[str, Island],
    free: dict[str, int],
) -> list[Decision]:
    """Mutates `free` by what the job takes; everything else is read only."""
    decisions: list[Decision] = [
        Release(job.id, seat.lease_id, "the island stopped answering: its work is not counted and not paid on")
        for seat in seats
        if seat.lost
    ]
    alive = [seat for seat in seats if not seat.lost]
    if job.deadline_min is not None and job.deadline_min <= market.now_min:
        return [*decisions, Wait(job.id, "deadline", "the deadline has passed")]
    held = [_held_option(job, seat, gpus, islands) for seat in alive]
    candidates, why_none = _candidates(market, job, {seat.island_id for seat in seats}, gpus, islands, free)
    budget_uusd = job.free_budget_uusd

    paid_ahead_uusd = sum(
        minute_cost_uusd(seat.price_uusd_per_gpu_hour, seat.gpus) * max(0, seat.end_min - market.now_min)
        for seat in alive
    )
    chosen = _grow(job, held, candidates, budget_uusd + paid_ahead_uusd)
    fresh = chosen.options[len(held) :]
    if len(chosen.options) < job.min_islands:
        if not alive:
            decisions.append(_waiting(job, candidates, why_none))
        fresh = ()
    minutes = _lease_minutes(market, job, chosen)

    # Extensions come first: money for what already trains is worth more than money for one more island.
    for seat in alive:
        if seat.end_min - market.now_min > market.extend_ahead_min:
            continue
        per_min = minute_cost_uusd(seat.price_uusd_per_gpu_hour, seat.gpus)
        until = max(seat.end_min, market.now_min + minutes)
        if seat.extendable_until_min is not None:
            until = min(until, seat.extendable_until_min)
        until = min(until, seat.end_min + (budget_uusd // per_min if per_min else until - seat.end_min))
        if until > seat.end_min:
            budget_uusd -= per_min * (until - seat.end_min)
            decisions.append(
                Extend(job.id, seat.lease_id, until, f"{until - seat.end_min} more minutes at {_price(seat)}")
            )
    taken: list[Place] = []
    for option in fresh:
        window = minutes if option.until_min is None else min(minutes, option.until_min - market.now_min)
        if option.uusd_per_min:
            window = min(window, budget_uusd // option.uusd_per_min)
        if window < max(1, islands[option.island_id].min_lease_min):
            continue
        budget_uusd -= option.uusd_per_min * window
        free[option.island_id] -= option.gpus
        taken.append(
            Place(
                job.id,
                option.island_id,
                option.gpus,
                market.now_min + window,
                option.price_uusd_per_gpu_hour,
                _why_placed(chosen, option),
            )
        )
    if len(alive) + len(taken) < job.min_islands and taken:
        for place in taken:
            free[place.island_id] += place.gpus
        taken = []
        decisions.append(Wait(job.id, "budget", f"the budget does not pay {job.min_islands} islands at once"))
    return [*decisions, *taken]


def _held_option(job: Job, seat: Seat, gpus: dict[str, Gpu], islands: dict[str, Island]) -> Option:
    island = islands.get(seat.island_id)
    speed = seat.tokens_per_s
    if speed is None and island is not None and island.gpu in gpus:
        speed = model_tokens_per_s(gpus[island.gpu], seat.gpus, job.parameters) * island.relative_speed
    replica = Replica(speed or 1.0, island.up_mbps if island else None, island.down_mbps if island else None)
    return Option(seat.island_id, seat.gpus, seat.price_uusd_per_gpu_hour, replica, seat.extendable_until_min)


def _candidates(
    market: Market,
    job: Job,
    occupied: set[str],
    gpus: dict[str, Gpu],
    islands: dict[str, Island],
    free: dict[str, int],
) -> tuple[list[Option], str]:
    """Islands the job could take now, best worth first, and why there is none."""
    options: list[Option] = []
    too_small = False
    for island in islands.values():
        count = free[island.id] if job.gpus_per_island is None else job.gpus_per_island
        gpu = gpus.get(island.gpu)
        if (
            island.id in occupied
            or island.id in job.avoided_islands
            or gpu is None
            or count < 1
            or count > free[island.id]
        ):
            continue
        if job.allowed_gpus is not None and island.gpu not in job.allowed_gpus:
            continue
        if job.min_vram_gib is not None and gpu.vram_gib < job.min_vram_gib:
            continue
        if not fits_memory(gpu, count, job.parameters):
            too_small = True
            continue
        if island.free_until_min is not None and island.free_until_min - market.now_min < island.min_lease_min:
            continue
        speed = model_tokens_per_s(gpu, count, job.parameters) * island.relative_speed
        replica = Replica(speed, island.up_mbps, island.down_mbps)
        options.append(Option(island.id, count, island.price_uusd_per_gpu_hour, replica, island.free_until_min))
    options.sort(key=lambda option: (-option.worth, option.island_id))
    return options, "memory" if too_small else "no_island"


def _grow(job: Job, held: list[Option], candidates: list[Option], money_uusd: int) -> Plan:
    """Add islands by worth while the run gets faster and the money still brings it to its end."""
    plan = plan_of(job, held)
    for option in candidates:
        if len(plan.options) >= job.max_islands:
            break
        grown = plan_of(job, (*plan.options, option))
        below_minimum = len(plan.options) < job.min_islands
        if grown.tokens_per_s <= plan.tokens_per_s and not below_minimum:
            continue
        if grown.cost_to_finish_uusd > money_uusd:
            continue
        plan = grown
    return plan


def _lease_minutes(market: Market, job: Job, plan: Plan) -> int:
    """As long as the policy's lease, no longer than the run needs, never past the deadline."""
    minutes = market.lease_min
    if math.isfinite(plan.minutes_to_finish):
        minutes = min(minutes, math.ceil(plan.minutes_to_finish * COST_MARGIN) + 1)
    if job.deadline_min is not None:
        minutes = min(minutes, job.deadline_min - market.now_min)
    return max(1, minutes)


def _waiting(job: Job, candidates: list[Option], why_none: str) -> Wait:
    """Why a job without a seat gets none, and what would change it."""
    if not candidates:
        if why_none == "memory":
            return Wait(job.id, "memory", "no free island has the memory for this model: more GPUs or larger ones")
        return Wait(job.id, "no_island", "no free island has the GPUs this job allows")
    if len(candidates) < job.min_islands:
        return Wait(job.id, "islands", f"{len(candidates)} of the {job.min_islands} islands it needs are free")
    cheapest = min((plan_of(job, (option,)).cost_to_finish_uusd for option in candidates), default=math.inf)
    return Wait(
        job.id,
        "budget",
        f"the cheapest way to finish costs about {dollars(cheapest)}, {dollars(job.free_budget_uusd)} is free",
    )


def _price(seat: Seat) -> str:
    return f"{dollars(seat.price_uusd_per_gpu_hour)} a GPU-hour"


def _why_placed(plan: Plan, option: Option) -> str:
    islands = "it alone" if len(plan.options) == 1 else f"{len(plan.options)} islands"
    return (
        f"{dollars(option.price_uusd_per_gpu_hour)} a GPU-hour for about {option.replica.tokens_per_s:,.0f} tokens/s; "
        f"with {islands} the run ends in {_minutes(plan.minutes_to_finish)}"
        f" for about {dollars(plan.cost_to_finish_uusd)}"
    )


def _minutes(minutes: float) -> str:
    if minutes < 1:
        return "under a minute"
    return f"about {minutes:,.0f} min" if minutes < 180 else f"about {minutes / 60:,.1f} h"
