"""Who holds which GPU-minute: SKUs, contracts, positions, leases, and the slots they sit on.

Invariant: positions are append-only and every contract's sum to zero; nobody but the originator of an SKU is below
zero at any minute, and the originator never below minus its capacity. Beside that, an exclusion constraint keeps any
slot of an island from being held twice in one minute. Time is integer UTC minutes, [start_min, end_min).
"""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import IntegerRangeField, RangeOperators
from django.db import models
from django.db.models import F, Func, Q
from django.db.models.functions import Mod, Sign
from django.db.models.lookups import Exact

from marketplace.accounts.models import Organisation
from marketplace.catalog.models import GpuModel
from marketplace.core.ids import LENGTH, new_id
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR
from marketplace.core.statemachine import Machine
from marketplace.fleet.models import Island


def sku_id() -> str:
    return new_id("sku")


def contract_id() -> str:
    return new_id("ctr")


def lease_id() -> str:
    return new_id("lse")


def order_id() -> str:
    return new_id("ord")


class Sku(models.Model):
    """An immutable fungible class: lots of one GPU on one island. A changed machine is a new SKU."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=sku_id, editable=False)
    island = models.ForeignKey(Island, on_delete=models.PROTECT, related_name="skus")
    originator = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="skus")
    gpu = models.ForeignKey(GpuModel, on_delete=models.PROTECT, related_name="skus")
    gpus_per_lot = models.PositiveIntegerField()
    lots = models.PositiveIntegerField()
    fabric = models.CharField(max_length=40, blank=True)  # "" is not stated
    created_at = models.DateTimeField()
    retired_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["island"], condition=Q(retired_at=None), name="one_live_sku_an_island"),
            models.CheckConstraint(name="sku_has_lots", condition=Q(lots__gt=0, gpus_per_lot__gt=0)),
        ]

    def __str__(self) -> str:
        return f"{self.lots} x {self.gpus_per_lot} {self.gpu_id} on {self.island_id}"


class LeasePurpose(models.TextChoices):
    RESERVE = "reserve", "Reserved"
    JOB = "job", "For a job"


class LeaseState(models.TextChoices):
    PENDING = "pending", "Not begun"
    ACTIVE = "active", "Active"
    ENDED = "ended", "Ended"
    CANCELLED = "cancelled", "Cancelled"
    FAILED = "failed", "Failed"


LEASE_MACHINE = Machine(
    "lease",
    {
        LeaseState.PENDING: {LeaseState.ACTIVE, LeaseState.CANCELLED, LeaseState.ENDED, LeaseState.FAILED},
        LeaseState.ACTIVE: {LeaseState.ENDED, LeaseState.FAILED},
        LeaseState.ENDED: set(),
        LeaseState.CANCELLED: set(),
        LeaseState.FAILED: set(),
    },
)


class OrderState(models.TextChoices):
    OPEN = "open", "Standing"
    FILLED = "filled", "Filled"
    CANCELLED = "cancelled", "Cancelled"


ORDER_MACHINE = Machine(
    "order",
    {
        OrderState.OPEN: {OrderState.FILLED, OrderState.CANCELLED},
        OrderState.FILLED: set(),
        OrderState.CANCELLED: set(),
    },
)


class Tif(models.TextChoices):
    """How long an order stands; the words of `matching.orders.Tif`."""

    FOK = "fok", "All of it now, or nothing"
    IOC = "ioc", "Only what can be had now"
    GTC = "gtc", "Until filled or cancelled"


class Colocation(models.TextChoices):
    """Where the GPUs of an order may lie; the words of `matching.orders.Colocation`."""

    SAME_NODES = "same_nodes", "The same machines throughout"
    SAME_ISLAND = "same_island", "One island"
    ANY = "any", "Anywhere"


class Side(models.TextChoices):
    BUY = "buy", "Buy"
    SELL = "sell", "Sell"


class Order(models.Model):
    """A bid for GPUs of one island, or of any with a GPU of this type, at an average of at most `limit`; or an ask for
    a part of a lease at no less than `limit`.

    What a bid can cost at most is held in the escrow of its own name; what is filled of it are leases. `wanted` is what
    it still wants, as rows of [gpus, start_min, end_min, island or null]: all of it at first, nothing in the end. An
    order for one island that got a part wants the rest of the same.

    An ask holds no money. `offered` is what of it is still for sale, as rows of [slot, start_min, end_min]: slots of
    the lease `of_lease`, which keeps them until somebody buys them."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=order_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="orders")
    side = models.CharField(max_length=4, choices=Side.choices, default=Side.BUY)
    of_lease = models.ForeignKey("Lease", on_delete=models.PROTECT, null=True, related_name="sales")
    replaces = models.OneToOneField("self", on_delete=models.PROTECT, null=True, related_name="replaced_by")
    island = models.ForeignKey(Island, on_delete=models.PROTECT, null=True, related_name="orders")
    gpu = models.ForeignKey(GpuModel, on_delete=models.PROTECT, null=True, related_name="orders")
    gpus_per_lot = models.PositiveIntegerField()
    gpus = models.PositiveIntegerField()
    start_min = models.PositiveIntegerField()
    end_min = models.PositiveIntegerField()
    duration_min = models.PositiveIntegerField(null=True)  # None: all of the window; else a block of it lies within
    limit_uusd_per_gpu_hour = models.BigIntegerField()
    tif = models.CharField(max_length=3, choices=Tif.choices)
    colocation = models.CharField(max_length=12, choices=Colocation.choices)
    # A basket: at least so many GPUs over several islands or none, and of each island at least so many.
    quorum_gpus = models.PositiveIntegerField(null=True)
    min_gpus_per_island = models.PositiveIntegerField(null=True)
    allow_partial_gpus = models.BooleanField(default=False)
    allow_partial_time = models.BooleanField(default=False)
    min_block_min = models.PositiveIntegerField()
    expires_at = models.DateTimeField(null=True)
    wanted = models.JSONField(default=list)
    offered = models.JSONField(default=list)
    state = models.CharField(max_length=10, choices=OrderState.choices, default=OrderState.OPEN)
    reason = models.CharField(max_length=200, blank=True)  # why it closed, in words
    holds = models.PositiveIntegerField(default=0)  # how often money was held for it: each is a tranche of its own
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="order_names_an_island_or_a_gpu",
                condition=Q(island__isnull=False, gpu=None) | Q(island=None, gpu__isnull=False),
            ),
            models.CheckConstraint(name="order_window", condition=Q(end_min__gt=F("start_min"), gpus__gt=0)),
            models.CheckConstraint(
                name="order_limit_by_the_minute",
                condition=Q(limit_uusd_per_gpu_hour__gt=0)
                & Q(Exact(Mod("limit_uusd_per_gpu_hour", PRICE_STEP_UUSD_PER_GPU_HOUR), 0)),
            ),
            models.CheckConstraint(
                name="order_basket_is_whole",
                condition=Q(quorum_gpus=None, min_gpus_per_island=None)
                | Q(quorum_gpus__gt=0, quorum_gpus__lte=F("gpus"), min_gpus_per_island__gt=0, duration_min=None),
            ),
            models.CheckConstraint(name="order_state_known", condition=Q(state__in=OrderState.values)),
            models.CheckConstraint(
                name="order_sells_a_lease_or_buys",
                condition=Q(side=Side.BUY, of_lease=None, offered=[])
                | Q(side=Side.SELL, of_lease__isnull=False, island__isnull=False, wanted=[]),
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["organisation", "-created_at"], name="order_by_organisation"),
            models.Index(
                fields=["-limit_uusd_per_gpu_hour", "created_at"],
                name="order_that_stands",
                condition=Q(state="open", side="buy"),
            ),
            models.Index(
                fields=["island", "limit_uusd_per_gpu_hour"],
                name="order_that_sells",
                condition=Q(state="open", side="sell"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id}: {self.gpus} GPUs of {self.island_id or self.gpu_id}"

    @property
    def asked_gpu_min(self) -> int:
        return self.gpus * (self.duration_min or self.end_min - self.start_min)


class Lease(models.Model):
    """The right to `lots` of an SKU for [start_min, end_min), at one price: what an agent serves and a meter bills.

    Its id is the assignment's, the meter's and the escrow's. Extending it appends a contract and moves `end_min`.

    A part of it that is sold on is a lease of its own, whose `upstream` is this one: its holder pays the holder of this
    one, who goes on paying for it. What is still held is in the allocations."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=lease_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="leases")  # the buyer
    seller = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="leases_sold")
    sku = models.ForeignKey(Sku, on_delete=models.PROTECT, related_name="leases")
    island = models.ForeignKey(Island, on_delete=models.PROTECT, related_name="leases")  # the SKU's
    lots = models.PositiveIntegerField()
    gpus = models.PositiveIntegerField()  # lots x gpus_per_lot
    order = models.ForeignKey(Order, on_delete=models.PROTECT, null=True, related_name="leases")  # that it came of
    sale = models.ForeignKey(
        Order, on_delete=models.PROTECT, null=True, related_name="sold"
    )  # the ask it was bought of
    upstream = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="resold")
    purpose = models.CharField(max_length=8, choices=LeasePurpose.choices)
    job_ref = models.CharField(max_length=LENGTH, blank=True)  # the job's id and the escrow that pays; "" is cash
    price_uusd_per_gpu_hour = models.BigIntegerField()
    fee_bps = models.PositiveSmallIntegerField()
    start_min = models.PositiveIntegerField()
    end_min = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=LeaseState.choices, default=LeaseState.PENDING)
    generation = models.PositiveIntegerField(default=1)  # rises with every new start of the work on it
    end_reason = models.CharField(max_length=40, blank=True)  # window | released | cancelled | island_lost | ...
    created_by = models.CharField(max_length=200)  # the actor's name
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    # After the end the agent's last counter is still waited for, until then; None once the meter is closed.
    settle_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="lease_window", condition=Q(end_min__gt=F("start_min"))),
            models.CheckConstraint(name="lease_has_gpus", condition=Q(lots__gt=0, gpus__gt=0)),
            models.CheckConstraint(
                name="lease_price_by_the_minute",
                condition=Q(price_uusd_per_gpu_hour__gt=0)
                & Q(Exact(Mod("price_uusd_per_gpu_hour", PRICE_STEP_UUSD_PER_GPU_HOUR), 0)),
            ),
            models.CheckConstraint(name="lease_state_known", condition=Q(state__in=LeaseState.values)),
            models.CheckConstraint(
                name="lease_of_a_sale_is_upstream",
                condition=Q(sale=None, upstream=None) | Q(sale__isnull=False, upstream__isnull=False),
            ),
            models.CheckConstraint(
                name="lease_for_a_job_names_it",
                condition=Q(purpose=LeasePurpose.RESERVE, job_ref="") | (Q(purpose=LeasePurpose.JOB) & ~Q(job_ref="")),
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["organisation", "-created_at"], name="lease_by_organisation"),
            models.Index(fields=["island", "state"], name="lease_by_island"),
            models.Index(fields=["job_ref"], name="lease_by_job", condition=~Q(job_ref="")),
            models.Index(fields=["settle_at"], name="lease_to_settle", condition=Q(settle_at__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.id}: {self.gpus} GPUs on {self.island_id}"


class ContractKind(models.TextChoices):
    RENT = "rent", "Rent"
    EXTEND = "extend", "Extension"
    RELEASE = "release", "Given back"
    RESALE = "resale", "Sold on"


class Contract(models.Model):
    """One trade: two position rows that sum to zero."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=contract_id, editable=False)
    kind = models.CharField(max_length=8, choices=ContractKind.choices)
    sku = models.ForeignKey(Sku, on_delete=models.PROTECT, related_name="contracts")
    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="contracts")
    lots = models.PositiveIntegerField()
    start_min = models.PositiveIntegerField()
    end_min = models.PositiveIntegerField()
    price_uusd_per_gpu_hour = models.BigIntegerField()
    created_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="contract_window", condition=Q(end_min__gt=F("start_min"), lots__gt=0)),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.lots} lots of {self.sku_id}"


class Position(models.Model):
    """A change of an organisation's step function of lots over time; append-only (trigger)."""

    contract = models.ForeignKey(Contract, on_delete=models.PROTECT, related_name="positions")
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="positions")
    sku = models.ForeignKey(Sku, on_delete=models.PROTECT, related_name="positions")
    start_min = models.PositiveIntegerField()
    end_min = models.PositiveIntegerField()
    delta_lots = models.IntegerField()
    # A seller may rent from itself: then only the side tells the two rows apart.
    originated = models.BooleanField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint("contract", Sign("delta_lots"), name="two_positions_a_contract"),
            models.CheckConstraint(name="position_moves", condition=~Q(delta_lots=0) & Q(end_min__gt=F("start_min"))),
        ]
        indexes: ClassVar = [models.Index(fields=["sku", "organisation", "start_min"], name="position_by_sku")]

    def __str__(self) -> str:
        return f"{self.organisation_id} {self.delta_lots:+d} of {self.sku_id}"


class Allocation(models.Model):
    """One slot of an island, held by a lease for [start_min, end_min). Shortened when the lease ends early, cut in two
    where minutes between are sold on."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="allocations")
    island = models.ForeignKey(Island, on_delete=models.PROTECT, related_name="allocations")
    slot = models.PositiveIntegerField()  # 0 .. lots - 1
    start_min = models.PositiveIntegerField()
    end_min = models.PositiveIntegerField()  # == start_min: given back before it began

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="allocation_window", condition=Q(end_min__gte=F("start_min"))),
            ExclusionConstraint(
                name="no_slot_is_held_twice",
                index_type="gist",
                expressions=[
                    ("island", RangeOperators.EQUAL),
                    ("slot", RangeOperators.EQUAL),
                    (
                        Func("start_min", "end_min", function="int4range", output_field=IntegerRangeField()),
                        RangeOperators.OVERLAPS,
                    ),
                ],
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["lease", "slot"], name="allocation_by_lease")]

    def __str__(self) -> str:
        return f"slot {self.slot} of {self.island_id} for {self.lease_id}"
