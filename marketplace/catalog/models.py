"""What others list: GPU names, channels, offers and the history of their prices.

Invariant: an offer's identity never depends on its price, its price history has one row per change, and what a channel
does not state is null. A stated price of zero cannot stand without a quarantine reason.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from marketplace.core.ids import LENGTH, new_id


def feed_run_id() -> str:
    return new_id("fdr")


class FormFactor(models.TextChoices):
    SXM = "sxm", "SXM"
    PCIE = "pcie", "PCIe"
    NVL = "nvl", "NVL"
    OAM = "oam", "OAM"
    SUPERCHIP = "superchip", "Superchip"
    UNKNOWN = "unknown", "not stated"


class GpuModel(models.Model):
    """A GPU by its canonical id `<model>-<form>-<vram>g`, e.g. `h100-sxm-80g`."""

    id = models.CharField(primary_key=True, max_length=LENGTH)
    vendor = models.CharField(max_length=20)
    family = models.CharField(max_length=40, db_index=True)
    form_factor = models.CharField(max_length=12, choices=FormFactor.choices)
    vram_gib = models.PositiveIntegerField(null=True)
    name = models.CharField(max_length=60)
    # Dense bf16 peak by the vendor's sheet; null where we have no source for it.
    bf16_dense_tflops = models.PositiveIntegerField(null=True)
    spec_source = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(name="gpu_vram_positive", condition=Q(vram_gib__isnull=True) | Q(vram_gib__gt=0)),
            models.CheckConstraint(name="gpu_form_known", condition=Q(form_factor__in=FormFactor.values)),
        ]

    def __str__(self) -> str:
        return self.name


class GpuAlias(models.Model):
    """A spelling seen in a public catalogue, with what had to be assumed to give it an id."""

    raw_name = models.CharField(max_length=80)
    raw_vram_gib = models.DecimalField(max_digits=7, decimal_places=2, null=True)
    raw_link = models.CharField(max_length=20, blank=True)
    gpu = models.ForeignKey(GpuModel, on_delete=models.PROTECT, related_name="aliases")
    flags = ArrayField(models.CharField(max_length=60), default=list)
    seen_at = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                name="alias_once", fields=["raw_name", "raw_vram_gib", "raw_link"], nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return f"{self.raw_name} is {self.gpu_id}"


class ChannelKind(models.TextChoices):
    LIST = "list", "list price"
    BROKER = "broker", "broker"
    ORDERBOOK = "orderbook", "order book"
    PEER = "peer", "peers"


class Channel(models.Model):
    """A door through which GPUs are offered. Whose machines they are is the offer's `upstream`."""

    slug = models.SlugField(primary_key=True, max_length=LENGTH)
    name = models.CharField(max_length=60)
    kind = models.CharField(max_length=12, choices=ChannelKind.choices)
    freshness_s = models.PositiveIntegerField()
    source_url = models.URLField()

    class Meta:
        constraints = [
            models.CheckConstraint(name="channel_freshness_positive", condition=Q(freshness_s__gt=0)),
            models.CheckConstraint(name="channel_kind_known", condition=Q(kind__in=ChannelKind.values)),
        ]

    def __str__(self) -> str:
        return self.name


class PricingModel(models.TextChoices):
    ON_DEMAND = "on_demand", "on demand"
    RESERVED = "reserved", "reserved"
    SPOT_FIXED = "spot_fixed", "spot"
    SPOT_BID = "spot_bid", "spot, by bid"
    ORDERBOOK = "orderbook", "order book"
    QUOTE_ONLY = "quote_only", "on request"


class PriceBasis(models.TextChoices):
    PER_GPU = "per_gpu", "per GPU"
    PER_INSTANCE = "per_instance", "per instance"
    PER_NODE = "per_node", "per node"
    PER_BLOCK = "per_block", "per block"


class Resale(models.TextChoices):
    YES = "yes", "yes"
    NO = "no", "no"
    UNKNOWN = "unknown", "not stated"


class Offer(models.Model):
    """One thing a channel lists. `raw` is kept as it came, so that a better reading can be made of it later."""

    offer_uid = models.CharField(primary_key=True, max_length=64)
    dedupe_group = models.CharField(max_length=64, db_index=True)
    channel = models.ForeignKey(Channel, on_delete=models.PROTECT, related_name="offers")
    upstream = models.CharField(max_length=60)
    upstream_sku = models.CharField(max_length=200)

    gpu = models.ForeignKey(GpuModel, null=True, on_delete=models.PROTECT, related_name="offers")
    gpu_name_raw = models.CharField(max_length=80)
    gpu_flags = ArrayField(models.CharField(max_length=60), default=list)
    vram_gib = models.PositiveIntegerField(null=True)
    gpus_per_node = models.PositiveIntegerField()
    intra_link = models.CharField(max_length=20, blank=True)
    vcpus = models.PositiveIntegerField(null=True)
    ram_mib = models.PositiveBigIntegerField(null=True)

    price_uusd_per_gpu_hour = models.BigIntegerField(null=True)
    price_raw = models.CharField(max_length=40, blank=True)
    price_basis_raw = models.CharField(max_length=12, choices=PriceBasis.choices)
    currency_raw = models.CharField(max_length=3)
    pricing_model = models.CharField(max_length=12, choices=PricingModel.choices)
    preemptible = models.BooleanField(null=True)
    preempt_notice_s = models.PositiveIntegerField(null=True)
    stock_lower_bound = models.PositiveIntegerField(null=True)

    region_raw = models.CharField(max_length=80, blank=True)
    data_centre_raw = models.CharField(max_length=80, blank=True)
    country = models.CharField(max_length=2, blank=True)
    tier = models.CharField(max_length=30, blank=True)
    resale_allowed = models.CharField(max_length=8, choices=Resale.choices, default=Resale.UNKNOWN)

    observed_at = models.DateTimeField()
    # Set while the channel's last refresh was not to be trusted: shown grey, not bookable.
    stale_since = models.DateTimeField(null=True)
    # Set when a trusted refresh no longer listed it: not shown.
    withdrawn_at = models.DateTimeField(null=True)
    quarantine_reason = models.CharField(max_length=60, blank=True)
    source_url = models.URLField()
    raw = models.JSONField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="offer_price_not_negative",
                condition=Q(price_uusd_per_gpu_hour__isnull=True) | Q(price_uusd_per_gpu_hour__gte=0),
            ),
            models.CheckConstraint(
                name="offer_zero_price_quarantined",
                condition=Q(price_uusd_per_gpu_hour__isnull=True)
                | Q(price_uusd_per_gpu_hour__gt=0)
                | ~Q(quarantine_reason=""),
            ),
            models.CheckConstraint(
                name="offer_unknown_gpu_quarantined", condition=Q(gpu__isnull=False) | ~Q(quarantine_reason="")
            ),
            models.CheckConstraint(name="offer_has_gpus", condition=Q(gpus_per_node__gt=0)),
            models.CheckConstraint(name="offer_vram_positive", condition=Q(vram_gib__isnull=True) | Q(vram_gib__gt=0)),
            models.CheckConstraint(name="offer_pricing_known", condition=Q(pricing_model__in=PricingModel.values)),
            models.CheckConstraint(name="offer_basis_known", condition=Q(price_basis_raw__in=PriceBasis.values)),
            models.CheckConstraint(name="offer_resale_known", condition=Q(resale_allowed__in=Resale.values)),
        ]
        indexes = [
            # The list a visitor sees, cheapest first.
            models.Index(
                F("price_uusd_per_gpu_hour").asc(nulls_last=True),
                "offer_uid",
                name="offer_listed_by_price",
                condition=Q(quarantine_reason="", withdrawn_at__isnull=True),
            ),
            models.Index(
                "gpu",
                F("price_uusd_per_gpu_hour").asc(nulls_last=True),
                "offer_uid",
                name="offer_listed_by_gpu_and_price",
                condition=Q(quarantine_reason="", withdrawn_at__isnull=True),
            ),
            models.Index(
                F("observed_at").desc(),
                "offer_uid",
                name="offer_listed_by_seen",
                condition=Q(quarantine_reason="", withdrawn_at__isnull=True),
            ),
            models.Index(fields=["gpu", "observed_at"], name="offer_by_gpu_seen"),
        ]

    def __str__(self) -> str:
        return f"{self.channel_id}: {self.gpus_per_node} x {self.gpu_name_raw}"


class PriceChange(models.Model):
    """The price of an offer from a moment on; null when it stopped stating one."""

    offer = models.ForeignKey(Offer, on_delete=models.CASCADE, related_name="price_changes")
    price_uusd_per_gpu_hour = models.BigIntegerField(null=True)
    observed_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(name="price_change_once", fields=["offer", "observed_at"])]

    def __str__(self) -> str:
        return f"{self.offer_id} at {self.observed_at:%Y-%m-%d %H:%M}"


class FeedOutcome(models.TextChoices):
    DONE = "done", "done"
    PARTLY_KEPT = "partly_kept", "some channels kept their old rows"
    FAILED = "failed", "failed"


class FeedRun(models.Model):
    """What one refresh of one feed found and did; an alarm reads `outcome`."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=feed_run_id, editable=False)
    feed = models.CharField(max_length=40, db_index=True)
    ran_at = models.DateTimeField()
    outcome = models.CharField(max_length=12, choices=FeedOutcome.choices)
    seen = models.PositiveIntegerField(default=0)
    created = models.PositiveIntegerField(default=0)
    repriced = models.PositiveIntegerField(default=0)
    withdrawn = models.PositiveIntegerField(default=0)
    quarantined = models.PositiveIntegerField(default=0)
    kept_channels = ArrayField(models.CharField(max_length=LENGTH), default=list)
    problem = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [models.Index(fields=["feed", "-ran_at"], name="feed_run_latest")]

    def __str__(self) -> str:
        return f"{self.feed} at {self.ran_at:%Y-%m-%d %H:%M}: {self.outcome}"
