"""What the policy sees and says: one instant of the market, frozen, and the decisions for it.

Units stand in the names: `_uusd` integer micro-USD, `_min` integer UTC minutes, `_mbps` megabits per second. None means
not stated, never zero. Every tuple is given in a stable order by the caller; the policy breaks ties by id.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. `mfu` is the share of the dense bf16 peak that training reaches: learned, or a prior."""

    id: str
    bf16_dense_tflops: float
    vram_gib: float
    mfu: float = 0.40


@dataclass(frozen=True)
class Island:
    """What one island offers now. `free_gpus` is what nobody holds until `free_until_min` (None: no end stated)."""

    id: str
    gpu: str
    free_gpus: int
    price_uusd_per_gpu_hour: int
    up_mbps: float | None = None
    down_mbps: float | None = None
    free_until_min: int | None = None
    min_lease_min: int = 1
    # What its GPUs reach of their type's speed: learned, or known to be far below (simulated GPUs are CPU threads).
    relative_speed: float = 1.0


@dataclass(frozen=True)
class Seat:
    """A lease on which a job trains now. `tokens_per_s` is what its rounds reported, None before the first."""

    lease_id: str
    job_id: str
    island_id: str
    gpus: int
    price_uusd_per_gpu_hour: int
    end_min: int
    tokens_per_s: float | None = None
    extendable_until_min: int | None = None  # how far the island's window and other leases let it go; None: no end
    lost: bool = False  # the island missed its beats: it trains nothing now


@dataclass(frozen=True)
class Job:
    """An elastic training job. `free_budget_uusd` is the budget less what is spent and less what is committed."""

    id: str
    parameters: int
    tokens_left: int
    free_budget_uusd: int
    min_islands: int = 1
    max_islands: int = 8
    gpus_per_island: int | None = None  # None: as many as the island has free
    allowed_gpus: frozenset[str] | None = None
    avoided_islands: frozenset[str] = frozenset()  # where its trainers failed again and again, a while ago
    min_vram_gib: float | None = None
    deadline_min: int | None = None
    batch_tokens: int = 4096
    inner_steps: int = 30
    bits_per_parameter: float = 4.0625
    waiting_since_min: int = 0


@dataclass(frozen=True)
class Market:
    """The whole of what one tick decides upon."""

    now_min: int
    gpus: tuple[Gpu, ...]
    islands: tuple[Island, ...]
    jobs: tuple[Job, ...]
    seats: tuple[Seat, ...] = ()
    lease_min: int = 30  # length of a lease the policy takes; it is extended while the job goes on
    extend_ahead_min: int = 5  # a lease is extended when no more than this is left of it


@dataclass(frozen=True)
class Place:
    """Rent `gpus` on an island for [now, until_min) out of the job's budget, and let the job train there."""

    job_id: str
    island_id: str
    gpus: int
    until_min: int
    price_uusd_per_gpu_hour: int  # the most it may cost: dearer at the booking means no booking
    why: str


@dataclass(frozen=True)
class Extend:
    job_id: str
    lease_id: str
    until_min: int
    why: str


@dataclass(frozen=True)
class Release:
    """Give a lease back early; the job drains from it at the next safe point."""

    job_id: str
    lease_id: str
    why: str


@dataclass(frozen=True)
class Wait:
    """Nothing is done for the job, and this is why."""

    job_id: str
    reason: str  # no_island | memory | budget | deadline | islands
    why: str


Decision = Place | Extend | Release | Wait
