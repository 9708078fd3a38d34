"""Sellers, islands and agents in the shape most tests want them; each call says only what it cares for."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role, User
from marketplace.accounts.services import ensure_organisation
from marketplace.catalog.models import FormFactor, GpuModel
from marketplace.fleet import services
from marketplace.fleet.models import Island
from worker_agent.protocol import PROTOCOL_VERSION, EnrolReply, EnrolRequest, GpuReading, HostFacts, SyncRequest

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
PASSWORD = "correct horse battery"
H100 = "NVIDIA H100 80GB HBM3"
_numbers = count(1)


def seller(email: str = "", role: str = Role.OWNER) -> Actor:
    """A person with an organisation of their own."""
    user = User.objects.create_user(email or f"seller{next(_numbers)}@example.org", PASSWORD)
    ensure_organisation(user)
    membership = user.memberships.get()
    membership.role = role
    membership.save(update_fields=["role"])
    return Actor.of_membership(membership)


def h100() -> GpuModel:
    model, _ = GpuModel.objects.get_or_create(
        pk="h100-sxm-80g",
        defaults={
            "vendor": "nvidia",
            "family": "H100",
            "form_factor": FormFactor.SXM,
            "vram_gib": 80,
            "name": "H100 SXM 80 GB",
        },
    )
    return model


def island(actor: Actor, *, now: datetime = NOW, **terms: Any) -> Island:
    """An island of four simulated H100, waiting for its agent."""
    site = terms.pop("site", None) or services.register_site(actor, name=f"site {next(_numbers)}", now=now)
    wanted: dict[str, Any] = {
        "name": "north",
        "gpu": h100().pk,
        "gpu_count": 4,
        "price_uusd_per_gpu_hour": 2_400_000,
        "available_from": now,
        "simulated": True,
    }
    return services.register_island(actor, site_id=site.id, now=now, **(wanted | terms))


def facts(gpus: int = 4, *, simulated: bool = True, name: str = H100, vram_mib: int | None = 81_559) -> HostFacts:
    readings = [
        GpuReading(index=index, name="Simulated GPU", simulated=True)
        if simulated
        else GpuReading(index=index, name=name, uuid=f"GPU-{index}", vram_mib=vram_mib)
        for index in range(gpus)
    ]
    return HostFacts(
        hostname="node-1",
        agent_version="0.1.0",
        python_version="3.11.9",
        platform="Linux",
        gpus=readings,
        gpu_source="simulated" if simulated else "nvml",
    )


def enrolled(actor: Actor, island: Island, *, now: datetime = NOW, reported: HostFacts | None = None) -> EnrolReply:
    issued = services.issue_join_token(actor, island.id, now)
    return services.enrol(enrol_request(issued.secret, reported), now)


def enrol_request(token: str, reported: HostFacts | None = None) -> EnrolRequest:
    return EnrolRequest(protocol=PROTOCOL_VERSION, join_token=token, facts=reported or facts())


def beat(number: int = 1, *, epoch: int = 1, boot_id: str = "boot-1", **more: Any) -> SyncRequest:
    return SyncRequest(
        protocol=PROTOCOL_VERSION, epoch=epoch, boot_id=boot_id, beat=number, agent_time_ms=1_000 * number, **more
    )
