"""Jobs and what becomes of them: members, rounds, seats, artifacts, decisions.

Invariant: a round's manifest is written once, with its seal, and is the same for everybody; a member's generation only
rises, and only its holder speaks for it. What a job may spend lies in the escrow of its id, so it can never cost more.
"""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from marketplace.accounts.models import Organisation
from marketplace.core.ids import LENGTH, new_id
from marketplace.core.statemachine import Machine
from marketplace.trading.models import Lease


def job_id() -> str:
    return new_id("job")


def member_id() -> str:
    return new_id("mem")


def artifact_id() -> str:
    return new_id("art")


class JobState(models.TextChoices):
    QUEUED = "queued", "Queued"  # no island yet
    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting for islands"  # it had some, and has too few now
    FINISHING = "finishing", "Finishing"  # its tokens are sealed; the last state is being written, or leases settle
    SUCCEEDED = "succeeded", "Succeeded"
    STOPPED = "stopped", "Stopped"  # by budget or deadline, with the last sealed state kept
    CANCELLED = "cancelled", "Cancelled"
    FAILED = "failed", "Failed"


ENDED = (JobState.SUCCEEDED, JobState.STOPPED, JobState.CANCELLED, JobState.FAILED)
JOB_MACHINE = Machine(
    "job",
    {
        JobState.QUEUED: {JobState.RUNNING, JobState.STOPPED, JobState.CANCELLED, JobState.FAILED},
        JobState.RUNNING: {
            JobState.WAITING,
            JobState.FINISHING,
            JobState.STOPPED,
            JobState.CANCELLED,
            JobState.FAILED,
        },
        JobState.WAITING: {
            JobState.RUNNING,
            JobState.FINISHING,
            JobState.STOPPED,
            JobState.CANCELLED,
            JobState.FAILED,
        },
        JobState.FINISHING: {JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED},
        JobState.SUCCEEDED: set(),
        JobState.STOPPED: set(),
        JobState.CANCELLED: set(),
        JobState.FAILED: set(),
    },
)


class Job(models.Model):
    """A model to be trained: the customer's spec, the run all members agree on, and how far it is."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=job_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="jobs")
    name = models.CharField(max_length=120)
    spec = models.JSONField()  # as submitted, with defaults filled in
    run = models.JSONField()  # protocol.RunSpec
    state = models.CharField(max_length=10, choices=JobState.choices, default=JobState.QUEUED)
    state_since = models.DateTimeField()
    reason = models.CharField(max_length=300, blank=True)  # why it stands where it stands, in words
    budget_uusd = models.BigIntegerField()  # held in the escrow of this job's id from the start
    deadline_at = models.DateTimeField(null=True)
    min_islands = models.PositiveIntegerField(default=1)
    max_islands = models.PositiveIntegerField(default=8)
    gpus_per_island = models.PositiveIntegerField(null=True)  # None: as many as an island has free
    allowed_gpus = ArrayField(models.CharField(max_length=LENGTH), null=True)  # None: any
    min_vram_gib = models.PositiveIntegerField(null=True)
    parameters = models.BigIntegerField()  # of the model: stated for a user's own module, computed for a GPT
    layout_digest = models.CharField(max_length=64, blank=True)  # as the first member reported it
    tokens_target = models.BigIntegerField()
    tokens_sealed = models.BigIntegerField(default=0)
    rounds_sealed = models.PositiveIntegerField(default=0)  # the next round's number
    data_cursor = models.BigIntegerField(default=0)  # first token nobody has been given yet
    bits_per_byte_first = models.FloatField(null=True)  # held out, of S_0
    bits_per_byte_last = models.FloatField(null=True)
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)  # its first round opened
    ended_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)  # all its leases are, and what was left of the budget went back

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="job_counts",
                condition=Q(budget_uusd__gt=0, tokens_target__gt=0, tokens_sealed__gte=0, parameters__gt=0),
            ),
            models.CheckConstraint(
                name="job_islands", condition=Q(min_islands__gte=1, max_islands__gte=F("min_islands"))
            ),
            models.CheckConstraint(name="job_state_known", condition=Q(state__in=JobState.values)),
        ]
        indexes: ClassVar = [
            models.Index(fields=["organisation", "-created_at"], name="job_by_organisation"),
            models.Index(fields=["state"], name="job_by_state"),
            models.Index(
                fields=["ended_at"], name="job_to_settle", condition=Q(settled_at=None, ended_at__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"


class MemberState(models.TextChoices):
    ASSIGNED = "assigned", "Starting"  # its lease stands, its trainer has not joined yet
    ACTIVE = "active", "Training"
    DRAINING = "draining", "Leaving"  # asked to go at the next safe point
    GONE = "gone", "Gone"


MEMBER_MACHINE = Machine(
    "member",
    {
        MemberState.ASSIGNED: {MemberState.ACTIVE, MemberState.DRAINING, MemberState.GONE},
        # A trainer that ended, or was restarted, is assigned again under the next generation.
        MemberState.ACTIVE: {MemberState.ASSIGNED, MemberState.DRAINING, MemberState.GONE},
        MemberState.DRAINING: {MemberState.GONE},
        MemberState.GONE: set(),
    },
)


class Member(models.Model):
    """A job's place on one lease. `generation` and `instance` fence off every process but the last that joined."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=member_id, editable=False)
    job = models.ForeignKey(Job, on_delete=models.PROTECT, related_name="members")
    lease = models.OneToOneField(Lease, on_delete=models.PROTECT, related_name="member")
    state = models.CharField(max_length=10, choices=MemberState.choices, default=MemberState.ASSIGNED)
    generation = models.PositiveIntegerField(default=1)
    restarts = models.PositiveIntegerField(default=0)  # trainers that failed here in a row, without a round between
    failed_at = models.DateTimeField(null=True)  # when the last of them ended, as which exit code, and with what words
    failure_code = models.IntegerField(null=True)
    failure = models.CharField(max_length=200, blank=True)
    instance = models.CharField(max_length=80, blank=True)  # "": nobody has joined in this generation
    phase = models.CharField(max_length=12, blank=True)  # as last polled: ready | training | submitted | final
    state_round = models.PositiveIntegerField(null=True)  # it holds S_{state_round}
    steps_done = models.PositiveIntegerField(default=0)
    tokens_done = models.BigIntegerField(default=0)  # of the open round
    step_ms = models.PositiveIntegerField(null=True)
    tokens_per_s = models.FloatField(null=True)  # of its last sealed round, compute time only
    device = models.CharField(max_length=40, blank=True)
    created_at = models.DateTimeField()
    joined_at = models.DateTimeField(null=True)
    last_poll_at = models.DateTimeField(null=True)
    draining_since = models.DateTimeField(null=True)
    gone_at = models.DateTimeField(null=True)
    gone_why = models.CharField(max_length=200, blank=True)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["job", "state"], name="member_by_job")]

    def __str__(self) -> str:
        return f"{self.id} of {self.job_id}"


class RoundState(models.TextChoices):
    OPEN = "open", "Open"
    SEALED = "sealed", "Sealed"


class Round(models.Model):
    """One outer step: its roster is its seats, its outcome the manifest that turns S_number into S_{number + 1}."""

    job = models.ForeignKey(Job, on_delete=models.PROTECT, related_name="rounds")
    number = models.PositiveIntegerField()
    attempt = models.PositiveIntegerField(default=1)  # rises when all its members were lost and it began again
    state = models.CharField(max_length=6, choices=RoundState.choices, default=RoundState.OPEN)
    opened_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    quorum_at = models.DateTimeField(null=True)
    sealed_at = models.DateTimeField(null=True)
    tokens_before = models.BigIntegerField()
    tokens = models.BigIntegerField(default=0)
    manifest = models.JSONField(null=True)  # protocol.Manifest, with the seal
    bytes_sent = models.BigIntegerField(default=0)
    train_loss_nats = models.FloatField(null=True)
    state_digest = models.CharField(max_length=64, blank=True)  # of S_{number + 1}, as most members reported it
    heldout_bits_per_byte = models.FloatField(null=True)  # of S_{number + 1}
    spent_uusd = models.BigIntegerField(null=True)  # what the job had cost when the round was sealed

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["job", "number"], name="one_round_of_a_number"),
            models.UniqueConstraint(fields=["job"], condition=Q(state="open"), name="one_open_round"),
            models.CheckConstraint(
                name="round_seal",
                condition=Q(state="open", manifest=None, sealed_at=None)
                | Q(state="sealed", manifest__isnull=False, sealed_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"round {self.number} of {self.job_id}"


class Seat(models.Model):
    """One member's part in one round: its order, what it submitted, and what came of it."""

    round = models.ForeignKey(Round, on_delete=models.CASCADE, related_name="seats")
    member = models.ForeignKey(Member, on_delete=models.PROTECT, related_name="seats")
    steps = models.PositiveIntegerField()
    data_slot = models.PositiveIntegerField()
    data_start = models.BigIntegerField()
    submitted_at = models.DateTimeField(null=True)
    digest = models.CharField(max_length=64, blank=True)
    size_bytes = models.BigIntegerField(null=True)
    tokens = models.BigIntegerField(null=True)
    steps_done = models.PositiveIntegerField(null=True)
    norm = models.FloatField(null=True)  # as we measured it
    train_loss_nats = models.FloatField(null=True)
    base_state_digest = models.CharField(max_length=64, blank=True)
    compute_ms = models.BigIntegerField(null=True)
    encode_ms = models.BigIntegerField(null=True)
    upload_ms = models.BigIntegerField(null=True)
    fault = models.CharField(max_length=40, blank=True)  # why its submission was refused by itself
    accepted = models.BooleanField(null=True)  # None until the seal
    refused_why = models.CharField(max_length=40, blank=True)
    clip = models.FloatField(null=True)
    applied_at = models.DateTimeField(null=True)
    applied_digest = models.CharField(max_length=64, blank=True)  # of S_{number + 1} as this member holds it
    wait_ms = models.BigIntegerField(null=True)
    download_ms = models.BigIntegerField(null=True)
    apply_ms = models.BigIntegerField(null=True)

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["round", "member"], name="one_seat_a_member")]

    def __str__(self) -> str:
        return f"{self.member_id} in {self.round_id}"


class ArtifactKind(models.TextChoices):
    DATASET = "dataset", "Data"
    MODULE = "module", "Code"
    PAYLOAD = "payload", "Pseudo-gradient"
    SNAPSHOT = "snapshot", "Checkpoint"


class Artifact(models.Model):
    """Bytes in the store, by content: the same bytes of one organisation are stored and listed once a job."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=artifact_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="artifacts")
    job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT, related_name="artifacts")  # None: uploaded
    kind = models.CharField(max_length=10, choices=ArtifactKind.choices)
    name = models.CharField(max_length=120, blank=True)
    digest = models.CharField(max_length=64)
    size_bytes = models.BigIntegerField()
    created_at = models.DateTimeField()
    stored_at = models.DateTimeField(null=True)  # None: announced, its bytes have not been seen
    round_number = models.PositiveIntegerField(null=True)  # of a snapshot: it holds S_{round_number}
    state_digest = models.CharField(max_length=64, blank=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["organisation", "job", "digest"], nulls_distinct=False, name="one_artifact_of_a_digest"
            ),
            models.CheckConstraint(name="artifact_size", condition=Q(size_bytes__gt=0)),
        ]
        indexes: ClassVar = [models.Index(fields=["job", "kind", "-round_number"], name="artifact_by_job")]

    def __str__(self) -> str:
        return f"{self.kind} {self.digest[:12]}"


class JobEvent(models.Model):
    """What happened to a job, in sentences, in order. `seq` makes a page boundary safe."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField()
    kind = models.CharField(max_length=40)  # submitted | placed | joined | sealed | lost | left | decision | ended
    message = models.CharField(max_length=400)
    detail = models.JSONField(default=dict)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["job", "id"], name="job_event_in_order")]

    def __str__(self) -> str:
        return f"{self.job_id} {self.kind}"


class SchedulerLock(models.Model):
    """Who may apply decisions now. One row; a token that no longer stands here applies nothing."""

    name = models.CharField(primary_key=True, max_length=20)
    token = models.UUIDField(null=True)
    expires_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.name
