"""What the tests of trading are set in. Times are whole minutes after START; money is round."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash, deposit
from marketplace.billing.services.ticking import capture_due
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import minute_of
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent, Island, IslandState, Site
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.services import rent
from worker_agent.protocol import UsageRecord

START = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
START_MIN = minute_of(START)
USD = 1_000_000
PRICE = 2_400_000  # 40_000 micro-USD a GPU-minute
GPU_MINUTE = PRICE // 60

_numbers = count(1)


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def funded(name: str, dollars: int = 1_000) -> Organisation:
    organisation = Organisation.objects.create(name=name)
    if dollars:
        deposit(organisation, dollars * USD, f"pi_{name}_{organisation.id}")
    return organisation


def make_island(owner: Organisation | None = None, **terms: Any) -> Island:
    number = next(_numbers)
    owner = owner or Organisation.objects.create(name=f"seller {number}")
    site = Site.objects.create(
        organisation=owner, name=f"site {number}", country="IS", region="north", created_at=START
    )
    gpu, _ = GpuModel.objects.get_or_create(
        id="h100-sxm-80g",
        defaults={"vendor": "nvidia", "family": "H100", "form_factor": "sxm", "name": "H100 SXM 80 GB"},
    )
    given: dict[str, Any] = {
        "name": f"island {number}",
        "gpu": gpu,
        "gpu_count": 8,
        "price_uusd_per_gpu_hour": PRICE,
        # Before whatever the clock of this machine says: the API and the pages are tested by the real one.
        "available_from": datetime(2020, 1, 1, tzinfo=UTC),
        "state": IslandState.ONLINE,
        "state_since": START,
        "created_at": START,
    }
    return Island.objects.create(site=site, organisation=owner, **{**given, **terms})


def make_agent(island: Island, epoch: int = 1) -> Agent:
    return Agent.objects.create(
        island=island,
        epoch=epoch,
        credential_hash=f"{next(_numbers):064d}",
        credential_issued_at=START,
        enrolled_at=START,
    )


def leased(
    buyer: Organisation, island: Island, gpus: int = 1, start: float | None = None, end: float = 60, now: float = 0
) -> Lease:
    """A reservation for [start, end) minutes after START."""
    start_at = None if start is None else at(start)
    return rent(buyer, island_id=island.pk, gpus=gpus, start_at=start_at, end_at=at(end), by="test", now=at(now))


def for_job(buyer: Organisation, island: Island, job_ref: str, gpus: int = 1, end: float = 60, now: float = 0) -> Lease:
    return rent(
        buyer,
        island_id=island.pk,
        gpus=gpus,
        end_at=at(end),
        purpose=LeasePurpose.JOB,
        job_ref=job_ref,
        by="scheduler",
        now=at(now),
    )


def charge_counted(agent: Agent, lease: Lease, gpu_ms: int, now: datetime) -> None:
    """The agent reports what it counted since the lease began, and the tick charges it."""
    record = UsageRecord(seq=1, assignment_id=lease.pk, gpu_ms_total=gpu_ms, observed_at_ms=0)
    hooks.take_usage(agent, [record], now)
    capture_due(now)


def cash_uusd(organisation: Organisation) -> int:
    return balance_uusd(cash(organisation))
