"""What we can run on: sites, islands, the agents that serve them, and what those agents reported.

Invariant: an island has one live agent, the one of its current epoch; enrolling anew raises the epoch and fences off
the one before. Tokens and credentials are stored as SHA-256 only. A usage report is counted once: (agent, seq) is
unique, and its figure is cumulative.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Mod
from django.db.models.lookups import Exact

from marketplace.accounts.models import Organisation
from marketplace.catalog.models import GpuModel
from marketplace.core.ids import LENGTH, new_id
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR
from marketplace.core.statemachine import Machine


def site_id() -> str:
    return new_id("ste")


def island_id() -> str:
    return new_id("isl")


def join_token_id() -> str:
    return new_id("jtk")


def agent_id() -> str:
    return new_id("agt")


class Site(models.Model):
    """A place with a network of its own; islands of one site share its links."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=site_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="sites")
    name = models.CharField(max_length=120)
    country = models.CharField(max_length=2, blank=True)  # ISO 3166-1 alpha-2; "" is not stated
    region = models.CharField(max_length=80, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["organisation", "name"], name="one_site_of_a_name")]

    def __str__(self) -> str:
        return self.name


class IslandState(models.TextChoices):
    REGISTERED = "registered", "Waiting for its agent"
    ONLINE = "online", "Online"
    SUSPECT = "suspect", "Missed beats"
    LOST = "lost", "Lost"
    DRAINING = "draining", "Draining"
    RETIRED = "retired", "Retired"


ISLAND_MACHINE = Machine(
    "island",
    {
        IslandState.REGISTERED: {IslandState.ONLINE, IslandState.DRAINING, IslandState.RETIRED},
        IslandState.ONLINE: {IslandState.SUSPECT, IslandState.DRAINING, IslandState.REGISTERED, IslandState.RETIRED},
        IslandState.SUSPECT: {
            IslandState.ONLINE,
            IslandState.LOST,
            IslandState.DRAINING,
            IslandState.REGISTERED,
            IslandState.RETIRED,
        },
        IslandState.LOST: {IslandState.ONLINE, IslandState.DRAINING, IslandState.REGISTERED, IslandState.RETIRED},
        # An agent that drains goes silent in the end, or is started again.
        IslandState.DRAINING: {IslandState.ONLINE, IslandState.LOST, IslandState.REGISTERED, IslandState.RETIRED},
        IslandState.RETIRED: set(),
    },
)


class Island(models.Model):
    """GPUs of one type behind one agent, offered at one asked price within one window."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=island_id, editable=False)
    site = models.ForeignKey(Site, on_delete=models.PROTECT, related_name="islands")
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="islands")  # the site's
    name = models.CharField(max_length=120)
    gpu = models.ForeignKey(GpuModel, on_delete=models.PROTECT, related_name="islands")
    gpu_count = models.PositiveIntegerField()
    gpus_per_lot = models.PositiveIntegerField(default=1)  # what is rented together: 8 for a whole node, 1 for a card
    price_uusd_per_gpu_hour = models.BigIntegerField()
    available_from = models.DateTimeField()
    available_until = models.DateTimeField(null=True)  # None: no end stated
    min_lease_min = models.PositiveIntegerField(default=1)
    wan_up_mbps = models.PositiveIntegerField(null=True)  # None: not stated
    wan_down_mbps = models.PositiveIntegerField(null=True)
    preemptible = models.BooleanField(default=False)
    preempt_notice_s = models.PositiveIntegerField(null=True)
    # GPUs posed by CPU slots, for rehearsals; said on every page that shows the island.
    simulated = models.BooleanField(default=False)
    listed = models.BooleanField(default=True)  # False: the owner takes no new leases
    state = models.CharField(max_length=12, choices=IslandState.choices, default=IslandState.REGISTERED)
    state_since = models.DateTimeField()
    epoch = models.PositiveIntegerField(default=0)  # of its agent; 0: none enrolled yet
    created_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["site", "name"], name="one_island_of_a_name"),
            models.CheckConstraint(
                name="island_price_by_the_minute",
                condition=Q(price_uusd_per_gpu_hour__gt=0)
                & Q(Exact(Mod("price_uusd_per_gpu_hour", PRICE_STEP_UUSD_PER_GPU_HOUR), 0)),
            ),
            models.CheckConstraint(
                name="island_is_whole_lots",
                condition=Q(gpu_count__gt=0, gpus_per_lot__gt=0) & Q(Exact(Mod("gpu_count", "gpus_per_lot"), 0)),
            ),
            models.CheckConstraint(
                name="island_window",
                condition=Q(available_until__isnull=True) | Q(available_until__gt=F("available_from")),
            ),
            models.CheckConstraint(name="island_state_known", condition=Q(state__in=IslandState.values)),
            models.CheckConstraint(name="island_min_lease", condition=Q(min_lease_min__gt=0)),
        ]
        indexes: ClassVar = [
            models.Index(fields=["organisation", "created_at"], name="island_by_organisation"),
            models.Index(fields=["state"], name="island_by_state"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def lots(self) -> int:
        return self.gpu_count // self.gpus_per_lot


class JoinToken(models.Model):
    """Lets one agent enrol, once, within the hour."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=join_token_id, editable=False)
    island = models.ForeignKey(Island, on_delete=models.CASCADE, related_name="join_tokens")
    token_hash = models.CharField(max_length=64, unique=True)
    hint = models.CharField(max_length=12)
    created_by = models.CharField(max_length=200)  # the actor's name
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.hint} for {self.island_id}"


def empty_facts() -> dict[str, Any]:
    return {}


class Agent(models.Model):
    """The process on the cluster that speaks for an island in one epoch."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=agent_id, editable=False)
    island = models.ForeignKey(Island, on_delete=models.PROTECT, related_name="agents")
    epoch = models.PositiveIntegerField()
    credential_hash = models.CharField(max_length=64, unique=True)
    credential_issued_at = models.DateTimeField()
    # A rotated credential is offered until it is seen; until then both work.
    next_credential_hash = models.CharField(max_length=64, blank=True)
    enrolled_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    revoked_why = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=empty_facts)  # protocol.HostFacts as last reported
    # Why what it reports is not what was registered; "" when it is. Such an island takes no new work.
    misfit = models.CharField(max_length=300, blank=True)
    version = models.CharField(max_length=40, blank=True)
    boot_id = models.CharField(max_length=80, blank=True)
    beat = models.BigIntegerField(default=0)
    draining = models.BooleanField(default=False)
    last_seen_at = models.DateTimeField(null=True)  # the last beat that counted
    heard_since = models.DateTimeField(null=True)  # the first of the beats that came without a break until then
    usage_acked_seq = models.BigIntegerField(default=0)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["island", "epoch"], name="one_agent_an_epoch"),
            models.UniqueConstraint(
                fields=["next_credential_hash"],
                condition=~Q(next_credential_hash=""),
                name="one_agent_of_a_next_credential",
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["last_seen_at"], name="agent_by_last_seen")]

    def __str__(self) -> str:
        return f"{self.id} of {self.island_id}, epoch {self.epoch}"


class UsageReport(models.Model):
    """What an agent said it delivered, as it said it; append-only. Billing counts the highest figure per epoch."""

    agent = models.ForeignKey(Agent, on_delete=models.PROTECT, related_name="usage_reports")
    seq = models.BigIntegerField()
    assignment_id = models.CharField(max_length=LENGTH)  # the lease's
    gpu_ms_total = models.BigIntegerField()
    observed_at_ms = models.BigIntegerField()  # the agent's clock: recorded, never trusted
    received_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["agent", "seq"], name="one_usage_report_a_seq"),
            models.CheckConstraint(name="usage_not_negative", condition=Q(gpu_ms_total__gte=0, seq__gte=0)),
        ]
        indexes: ClassVar = [models.Index(fields=["assignment_id", "received_at"], name="usage_by_assignment")]

    def __str__(self) -> str:
        return f"{self.agent_id} #{self.seq}: {self.gpu_ms_total} GPU-ms of {self.assignment_id}"


class FleetEvent(models.Model):
    """What happened to an island, for its page: one row a change."""

    island = models.ForeignKey(Island, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField()
    kind = models.CharField(max_length=40)  # registered | enrolled | online | suspect | lost | draining | revoked | ...
    message = models.CharField(max_length=300)
    detail = models.JSONField(default=dict)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["island", "-at"], name="fleet_event_by_island")]

    def __str__(self) -> str:
        return f"{self.island_id} {self.kind}"
