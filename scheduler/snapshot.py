"""The market as it is at one instant, from rows to the policy's frozen state.

Invariant: everything is read in one repeatable-read transaction, in a number of queries that does not grow with the
rows, and in a stable order; nothing is written. What the policy is not told of, it cannot take: an island that is not
online, not listed or whose GPUs have no known speed is offered with nothing free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from django.db import connection, transaction

from marketplace.billing.models import AccountKind, LedgerAccount
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import minute_of
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Lease
from marketplace.trading.selectors import LIVE, Free, extendable_until, free_now
from marketplace.training.models import Job, JobState, Member, MemberState
from marketplace.training.services.membership import FAILURES_MAX
from scheduler.policy import state

WANTING = (JobState.QUEUED, JobState.RUNNING, JobState.WAITING)
# How long a job is kept off an island on which its trainers failed until the place was given up.
AVOID_FOR = timedelta(minutes=15)
SEATED = (MemberState.ASSIGNED, MemberState.ACTIVE)
# Bits of a payload a parameter, with the fp16 scale of its block of 256.
BITS_PER_PARAMETER = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0625, "int4": 4.0625}
# What a simulated GPU computes: one thread of a CPU, not what its name promises.
SIMULATED_FLOPS = 1e10


def read_market(now: datetime) -> state.Market:
    """The whole of what one tick decides upon."""
    now_min = minute_of(now)
    with _one_instant():
        jobs = list(Job.objects.filter(state__in=WANTING).order_by("id"))
        members = list(
            Member.objects.filter(job__in=jobs, state__in=SEATED, lease__state__in=LIVE)
            .select_related("lease__island", "lease__sku")
            .order_by("id")
        )
        avoided: dict[str, set[str]] = defaultdict(set)
        given_up = Member.objects.filter(
            job__in=jobs, state=MemberState.GONE, restarts__gte=FAILURES_MAX, gone_at__gt=now - AVOID_FOR
        )
        for job_id, island_id in given_up.values_list("job_id", "lease__island_id"):
            avoided[job_id].add(island_id)
        held = {member.lease.island_id for member in members}
        open_ids = Island.objects.filter(state=IslandState.ONLINE, listed=True).values_list("id", flat=True)
        islands = list(
            Island.objects.filter(pk__in=[*open_ids, *held]).select_related("gpu").order_by("id") if jobs else []
        )
        free = free_now(islands, now_min)
        until_min = extendable_until([member.lease for member in members])
        escrows = LedgerAccount.objects.filter(kind=AccountKind.ESCROW, ref__in=[job.pk for job in jobs])
        money = {account.ref: account.available_uusd for account in escrows}
    gpus = {island.gpu_id: island.gpu for island in islands if island.gpu.bf16_dense_tflops and island.gpu.vram_gib}
    return state.Market(
        now_min=now_min,
        gpus=tuple(_gpu(gpus[gpu_id]) for gpu_id in sorted(gpus)),
        islands=tuple(_island(island, free[island.pk]) for island in islands),
        jobs=tuple(_job(job, money.get(job.pk, 0), frozenset(avoided[job.pk])) for job in jobs),
        seats=tuple(_seat(member, until_min[member.lease_id]) for member in members),
    )


def relative_speed(island: Island) -> float:
    """Of what the sheet of its GPUs promises to training."""
    peak = island.gpu.bf16_dense_tflops
    if not island.simulated or not peak:
        return 1.0
    return SIMULATED_FLOPS / (peak * 1e12 * state.Gpu.mfu)


def _gpu(gpu: GpuModel) -> state.Gpu:
    return state.Gpu(gpu.pk, float(gpu.bf16_dense_tflops or 0), float(gpu.vram_gib or 0))


def _island(island: Island, free: Free) -> state.Island:
    bookable = island.state == IslandState.ONLINE and island.listed
    return state.Island(
        id=island.pk,
        gpu=island.gpu_id,
        free_gpus=free.gpus if bookable else 0,
        price_uusd_per_gpu_hour=island.price_uusd_per_gpu_hour,
        up_mbps=island.wan_up_mbps,
        down_mbps=island.wan_down_mbps,
        free_until_min=free.until_min,
        min_lease_min=island.min_lease_min,
        relative_speed=relative_speed(island),
    )


def _job(job: Job, free_uusd: int, avoided: frozenset[str]) -> state.Job:
    run, sync = job.run, job.run.get("sync", {})
    defaults = state.Job("", 1, 0, 0)
    return state.Job(
        id=job.pk,
        parameters=job.parameters,
        tokens_left=max(0, job.tokens_target - job.tokens_sealed),
        free_budget_uusd=free_uusd,
        min_islands=job.min_islands,
        max_islands=job.max_islands,
        gpus_per_island=job.gpus_per_island,
        allowed_gpus=None if job.allowed_gpus is None else frozenset(job.allowed_gpus),
        avoided_islands=avoided,
        min_vram_gib=job.min_vram_gib,
        deadline_min=None if job.deadline_at is None else minute_of(job.deadline_at),
        batch_tokens=run.get("batch_tokens", defaults.batch_tokens),
        inner_steps=sync.get("inner_steps", defaults.inner_steps),
        bits_per_parameter=BITS_PER_PARAMETER[sync.get("codec", "int4")],
        waiting_since_min=minute_of(job.created_at),
    )


def _seat(member: Member, until_min: int | None) -> state.Seat:
    lease: Lease = member.lease
    return state.Seat(
        lease_id=lease.pk,
        job_id=member.job_id,
        island_id=lease.island_id,
        gpus=lease.gpus,
        price_uusd_per_gpu_hour=lease.price_uusd_per_gpu_hour,
        end_min=lease.end_min,
        tokens_per_s=member.tokens_per_s,
        extendable_until_min=until_min,
        lost=lease.island.state == IslandState.LOST,
    )


@contextmanager
def _one_instant() -> Iterator[None]:
    """Every query sees the same moment. Inside a caller's transaction its own isolation stands."""
    nested = connection.in_atomic_block
    with transaction.atomic():
        if not nested:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield
