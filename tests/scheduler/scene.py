"""What the scheduler's tests are set in: a funded customer, islands that are online, jobs that wait. Time is real time:
a tick asks the database for it."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import count
from typing import Any

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.billing.services.holds import deposit
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.fleet.models import Island, IslandState, Site
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.services import rent
from marketplace.training.models import Job, Member, MemberState
from marketplace.training.services import place_member, submit_job
from marketplace.training.spec import JobSpecForm
from scheduler import tasks

USD = 1_000_000
PRICE = 2_400_000

_numbers = count(1)


def customer(dollars: int = 1_000) -> Actor:
    organisation = Organisation.objects.create(name=f"lab {next(_numbers)}")
    deposit(organisation, dollars * USD, f"pi_{organisation.pk}")
    return Actor(organisation, Role.OWNER, "user:1")


def island(**terms: Any) -> Island:
    number = next(_numbers)
    now = database_now()
    owner = Organisation.objects.create(name=f"seller {number}")
    site = Site.objects.create(organisation=owner, name=f"site {number}", created_at=now)
    gpu, _ = GpuModel.objects.get_or_create(
        id="h100-sxm-80g",
        defaults={
            "vendor": "nvidia",
            "family": "H100",
            "form_factor": "sxm",
            "name": "H100 SXM 80 GB",
            "vram_gib": 80,
            "bf16_dense_tflops": 989,
        },
    )
    given: dict[str, Any] = {
        "name": f"island {number}",
        "gpu": gpu,
        "gpu_count": 8,
        "price_uusd_per_gpu_hour": PRICE,
        "available_from": now - timedelta(days=1),
        "state": IslandState.ONLINE,
        "state_since": now,
        "created_at": now,
    }
    return Island.objects.create(site=site, organisation=owner, **{**given, **terms})


def job(actor: Actor, **terms: Any) -> Job:
    """A 1.2 G parameter model over 20 G tokens: hours on a few islands of eight H100."""
    asked = {
        "name": "run",
        "model": {"kind": "gpt", "n_layer": 24, "n_head": 16, "d_model": 2048, "context": 1024},
        "tokens": 20_000_000_000,
        "batch_tokens": 524_288,
        "budget_uusd": 900 * USD,
        "max_islands": 2,
        **terms,
    }
    now = database_now()
    form = JobSpecForm(data=asked, context={"now": now})
    form.is_valid(raise_exception=True)
    return submit_job(actor, form.validated_data, now)


def placed(of: Job, on: Island, *, minutes: int) -> Lease:
    """A place taken for so long, its trainer at work."""
    now = database_now()
    end_at = minute_start(minute_of(now) + minutes)
    lease = rent(
        of.organisation,
        island_id=on.pk,
        gpus=on.gpu_count,
        end_at=end_at,
        purpose=LeasePurpose.JOB,
        job_ref=of.pk,
        by="test",
        now=now,
    )
    start(place_member(of, lease, now, "a test"))
    return lease


def start(member: Member, now: datetime | None = None) -> None:
    """Its trainer has joined."""
    now = now or database_now()
    Member.objects.filter(pk=member.pk).update(
        state=MemberState.ACTIVE, instance="one", joined_at=now, last_poll_at=now
    )


def lose(island: Island) -> None:
    Island.objects.filter(pk=island.pk).update(state=IslandState.LOST)


def tick() -> int:
    done: int = tasks.tick()
    return done


def sweep() -> None:
    tasks.sweep()


def live_leases(of: Job) -> list[Lease]:
    return list(Lease.objects.filter(job_ref=of.pk, state__in=["pending", "active"]).order_by("pk"))


def state_of(of: Job) -> str:
    return str(Job.objects.values_list("state", flat=True).get(pk=of.pk))
