"""Who does how much of a round, on which part of the data. Pure.

Invariant: the ranges handed out are disjoint and follow the cursor without a gap, so no token is read twice whoever
joins, leaves or dies; an order depends on the roster and nothing else, whatever the order in which members are named.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from worker_agent.protocol import RunSpec

STEPS_LIMIT = 4  # times the median's: a member that claims to be faster gets no more


@dataclass(frozen=True)
class Order:
    member_id: str
    steps: int
    data_slot: int
    data_start: int


def tokens_per_step(run: RunSpec) -> int:
    """Whole windows only, as the trainer cuts its batches."""
    return run.batch_tokens // run.model.context * run.model.context


def steps_of(run: RunSpec, step_ms: Mapping[str, int | None]) -> dict[str, int]:
    """H of each member, so that all are done at about the same time: the median does the run's inner steps.

    Unequal members have unequal tokens, and the outer step weighs them by tokens. An unmeasured one counts as median.
    """
    known = [ms for ms in step_ms.values() if ms]
    median = statistics.median(known) if known else 0
    wanted = run.sync.inner_steps
    return {
        member_id: min(STEPS_LIMIT * wanted, max(1, round(wanted * median / ms))) if ms else wanted
        for member_id, ms in step_ms.items()
    }


def orders_of(
    run: RunSpec,
    step_ms: Mapping[str, int | None],
    *,
    tokens_before: int,
    cursor: int,
    taken_slots: Collection[int] = (),
    others: int = 0,
) -> tuple[list[Order], int]:
    """The orders of these members and the cursor after them. `others` keep the orders and slots they have.

    What is left of the run is shared, so that no round overshoots it by more than a step of each member."""
    step_tokens = tokens_per_step(run)
    fair = -(-max(0, run.tokens - tokens_before) // (step_tokens * max(1, len(step_ms) + others)))
    free = (slot for slot in range(len(step_ms) + len(taken_slots)) if slot not in taken_slots)
    orders = []
    for member_id, wanted in sorted(steps_of(run, step_ms).items()):
        steps = max(1, min(wanted, fair))
        orders.append(Order(member_id, steps, next(free), cursor))
        cursor += steps * step_tokens
    return orders, cursor
