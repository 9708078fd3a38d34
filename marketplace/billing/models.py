"""The ledger's rows: accounts, transfers, the meters that turn GPU time into transfers, and payments on their way in.

Invariant: a transfer is never changed, and a balance changes only with the transfer that explains it. Both are kept by
the database (migration 0002): the function `ledger_post` is the one writer, triggers refuse everyone else.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Mod
from django.db.models.lookups import Exact

from marketplace.accounts.models import Organisation
from marketplace.core.ids import LENGTH, new_id
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR, UUSD_PER_CENT, UUSD_PER_USD
from marketplace.core.statemachine import Machine

# Below, the card's fixed fee is most of it; above, a bank transfer is cheaper for both.
TOP_UP_LEAST_UUSD = 5 * UUSD_PER_USD
TOP_UP_MOST_UUSD = 50_000 * UUSD_PER_USD


def top_up_id() -> str:
    return new_id("top")


def payout_id() -> str:
    return new_id("pyt")


def card_refund_id() -> str:
    return new_id("rfd")


def correction_id() -> str:
    return new_id("cor")


class AccountKind(models.TextChoices):
    STRIPE_PENDING = "stripe_pending", "Charged, not yet available"
    STRIPE_AVAILABLE = "stripe_available", "Available for payouts"
    BANK = "bank", "Our bank"
    BUYER_RECEIVABLE = "buyer_receivable", "Owed by a buyer"
    SELLER_RECEIVABLE = "seller_receivable", "Owed by a seller"
    BUYER_CASH = "buyer_cash", "Cash"
    BUYER_PROMO = "buyer_promo", "Granted"
    ESCROW = "escrow", "Held"
    SELLER_ACCRUED = "seller_accrued", "Earned, in the dispute window"
    SELLER_PAYABLE = "seller_payable", "Payable"
    SELLER_RESERVE = "seller_reserve", "Kept in reserve"
    FEE_REVENUE = "fee_revenue", "Fees"
    STRIPE_FEES = "stripe_fees", "Card fees"
    SLA_CREDIT = "sla_credit", "Goodwill"
    PROMO_COST = "promo_cost", "Granted by us"
    CHARGEBACK_LOSS = "chargeback_loss", "Lost to disputes"
    BAD_DEBT = "bad_debt", "Not paid to us"


class Normal(models.TextChoices):
    """The side on which an account grows."""

    DEBIT = "D", "Debit"
    CREDIT = "C", "Credit"


# Assets and costs grow by debits; what we owe, and what we earned, by credits.
NORMAL: dict[AccountKind, Normal] = {
    AccountKind.STRIPE_PENDING: Normal.DEBIT,
    AccountKind.STRIPE_AVAILABLE: Normal.DEBIT,
    AccountKind.BANK: Normal.DEBIT,
    AccountKind.BUYER_RECEIVABLE: Normal.DEBIT,
    AccountKind.SELLER_RECEIVABLE: Normal.DEBIT,
    AccountKind.BUYER_CASH: Normal.CREDIT,
    AccountKind.BUYER_PROMO: Normal.CREDIT,
    AccountKind.ESCROW: Normal.CREDIT,
    AccountKind.SELLER_ACCRUED: Normal.CREDIT,
    AccountKind.SELLER_PAYABLE: Normal.CREDIT,
    AccountKind.SELLER_RESERVE: Normal.CREDIT,
    AccountKind.FEE_REVENUE: Normal.CREDIT,
    AccountKind.STRIPE_FEES: Normal.DEBIT,
    AccountKind.SLA_CREDIT: Normal.DEBIT,
    AccountKind.PROMO_COST: Normal.DEBIT,
    AccountKind.CHARGEBACK_LOSS: Normal.DEBIT,
    AccountKind.BAD_DEBT: Normal.DEBIT,
}
# These record what happened elsewhere, so nothing we do may be refused for their sake; all others stop at zero.
WITHOUT_FLOOR = frozenset(
    {
        AccountKind.STRIPE_PENDING,
        AccountKind.BANK,
        AccountKind.FEE_REVENUE,
        AccountKind.STRIPE_FEES,
        AccountKind.SLA_CREDIT,
        AccountKind.PROMO_COST,
        AccountKind.CHARGEBACK_LOSS,
        AccountKind.BAD_DEBT,
    }
)


class LedgerAccount(models.Model):
    kind = models.CharField(max_length=24, choices=AccountKind.choices)
    organisation = models.ForeignKey(
        Organisation, null=True, on_delete=models.PROTECT, related_name="ledger_accounts"
    )  # None: ours
    ref = models.CharField(max_length=80, default="")  # what an escrow is for; the shard of a recording account
    currency = models.CharField(max_length=3, default="USD")
    normal = models.CharField(max_length=1, choices=Normal.choices)
    floor_uusd = models.BigIntegerField(null=True)
    debits_pending_uusd = models.BigIntegerField(default=0)
    debits_posted_uusd = models.BigIntegerField(default=0)
    credits_pending_uusd = models.BigIntegerField(default=0)
    credits_posted_uusd = models.BigIntegerField(default=0)
    closed_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["kind", "organisation", "ref", "currency"], nulls_distinct=False, name="one_account_per_purpose"
            ),
            # What is pending against an account counts as gone, what is pending for it does not count yet.
            models.CheckConstraint(
                name="ledger_account_floor",
                condition=Q(floor_uusd=None)
                | Q(
                    normal=Normal.CREDIT,
                    credits_posted_uusd__gte=F("debits_posted_uusd") + F("debits_pending_uusd") + F("floor_uusd"),
                )
                | Q(
                    normal=Normal.DEBIT,
                    debits_posted_uusd__gte=F("credits_posted_uusd") + F("credits_pending_uusd") + F("floor_uusd"),
                ),
            ),
            models.CheckConstraint(
                name="ledger_account_sums_not_negative",
                condition=Q(debits_pending_uusd__gte=0, debits_posted_uusd__gte=0)
                & Q(credits_pending_uusd__gte=0, credits_posted_uusd__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.organisation_id or "", self.ref) if part)

    @property
    def balance_uusd(self) -> int:
        """Posted, on the side on which the account grows."""
        difference = self.credits_posted_uusd - self.debits_posted_uusd
        return difference if self.normal == Normal.CREDIT else -difference

    @property
    def available_uusd(self) -> int:
        """The balance without what is pending against it."""
        leaving = self.debits_pending_uusd if self.normal == Normal.CREDIT else self.credits_pending_uusd
        return self.balance_uusd - leaving


class TransferKind(models.IntegerChoices):
    DEPOSIT = 10, "Deposit"
    SETTLE = 11, "Became available"
    CARD_FEE = 12, "Card fee"
    PROMO = 13, "Granted"
    HOLD = 20, "Hold"
    EARMARK = 21, "Part of a hold"
    RELEASE = 22, "Release"
    CAPTURE = 30, "Usage"
    FEE = 31, "Fee"
    SELLER_REFUND = 40, "Refund by the seller"
    FEE_REFUND = 41, "Fee given back"
    GOODWILL = 42, "Goodwill"
    MATURE = 50, "Became payable"
    RESERVE = 51, "Kept in reserve"
    RESERVE_RELEASE = 52, "Out of reserve"
    SET_OFF = 53, "Set off against what was owed"
    PAYOUT = 60, "Payout"
    PAYOUT_REVERSAL = 61, "Payout taken back"
    CARD_REFUND = 70, "Refund to the card"
    CHARGEBACK = 71, "Disputed payment"
    CHARGEBACK_WON = 72, "Dispute won"
    CORRECTION = 90, "Correction"


class Phase(models.TextChoices):
    SINGLE = "S", "Posted at once"
    PENDING = "P", "Pending"
    CONFIRM = "C", "Pending, now posted"
    VOID = "V", "Pending, now void"


class Transfer(models.Model):
    id = models.UUIDField(primary_key=True)  # of the fact it records: the same fact cannot be recorded twice
    kind = models.PositiveSmallIntegerField(choices=TransferKind.choices)
    phase = models.CharField(max_length=1, choices=Phase.choices)
    debit = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="debits")
    credit = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="credits")
    amount_uusd = models.BigIntegerField()
    pending = models.OneToOneField("self", null=True, on_delete=models.PROTECT, related_name="resolution")
    journal_id = models.UUIDField(db_index=True)  # transfers of one journal were posted together
    ref = models.CharField(max_length=80, default="")
    effective_at = models.DateTimeField()
    created_at = models.DateTimeField(db_default=models.Func(function="clock_timestamp"))

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["debit", "created_at"], name="transfer_by_debit"),
            models.Index(fields=["credit", "created_at"], name="transfer_by_credit"),
            models.Index(fields=["ref", "kind"], name="transfer_by_ref"),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(name="transfer_amount_positive", condition=Q(amount_uusd__gt=0)),
            models.CheckConstraint(name="transfer_between_two_accounts", condition=~Q(debit=F("credit"))),
            models.CheckConstraint(
                name="transfer_resolves_a_pending_one",
                condition=Q(phase__in=[Phase.SINGLE, Phase.PENDING], pending=None)
                | Q(phase__in=[Phase.CONFIRM, Phase.VOID], pending__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.id}"


class MeterState(models.TextChoices):
    OPEN = "open", "Open"
    CLOSED = "closed", "Closed"


class Meter(models.Model):
    """What one lease may be billed: one price, one window, one high-water mark."""

    id = models.CharField(primary_key=True, max_length=LENGTH)  # the lease's
    buyer = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="meters_bought")
    seller = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="meters_sold")
    escrow = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="meters_paid")
    refund = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="meters_refunded")
    rate_uusd_per_gpu_hour = models.BigIntegerField()
    fee_bps = models.PositiveSmallIntegerField()
    gpus = models.PositiveIntegerField()
    start_at = models.DateTimeField()
    end_at = models.DateTimeField()
    billable_gpu_ms = models.BigIntegerField(default=0)
    charged_uusd = models.BigIntegerField(default=0)
    fee_uusd = models.BigIntegerField(default=0)  # ours, part of what was charged
    # Of what the seller earned: what became payable or went to the reserve, and what was taken back before it could.
    matured_uusd = models.BigIntegerField(default=0)
    unmatured_refunds_uusd = models.BigIntegerField(default=0)
    refunded_uusd = models.BigIntegerField(default=0)  # to the buyer, of what was charged
    fee_refunded_uusd = models.BigIntegerField(default=0)  # our part of that
    covered_gpu_ms = models.BigIntegerField(default=0)
    last_beat_at = models.DateTimeField(null=True)
    # What was bought of a holder who goes on paying for it: what is counted here counts there first.
    upstream = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="resold")
    state = models.CharField(max_length=6, choices=MeterState.choices, default=MeterState.OPEN)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="meter_rate_by_the_minute",
                condition=Q(rate_uusd_per_gpu_hour__gte=0)
                & Q(Exact(Mod("rate_uusd_per_gpu_hour", PRICE_STEP_UUSD_PER_GPU_HOUR), 0)),
            ),
            models.CheckConstraint(name="meter_window", condition=Q(end_at__gt=F("start_at"), gpus__gt=0)),
            models.CheckConstraint(name="meter_fee_is_a_part", condition=Q(fee_bps__lte=10_000)),
            models.CheckConstraint(
                name="meter_gives_back_no_more_than_it_took",
                condition=Q(refunded_uusd__gte=F("fee_refunded_uusd"), refunded_uusd__lte=F("charged_uusd"))
                & Q(fee_refunded_uusd__gte=0, fee_refunded_uusd__lte=F("fee_uusd"))
                & Q(matured_uusd__gte=0, unmatured_refunds_uusd__gte=0)
                & Q(charged_uusd__gte=F("fee_uusd") + F("matured_uusd") + F("unmatured_refunds_uusd")),
            ),
            models.CheckConstraint(
                name="meter_sums",
                condition=Q(fee_uusd__gte=0, charged_uusd__gte=F("fee_uusd"))
                & Q(billable_gpu_ms__gte=0, covered_gpu_ms__gte=F("billable_gpu_ms")),
            ),
        ]

    def __str__(self) -> str:
        return self.id


class MeterCounter(models.Model):
    """The agent's cumulative counter of one assignment; a restart that lost it opens the next epoch. Epochs add up, and
    so do the assignments that a lease is served by: parts of it that were sold on are served as leases of their own."""

    meter = models.ForeignKey(Meter, on_delete=models.PROTECT, related_name="counters")
    source = models.CharField(max_length=80, default="")  # the assignment; "" is the lease itself
    epoch = models.PositiveBigIntegerField()
    gpu_ms_total = models.PositiveBigIntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["meter", "source", "epoch"], name="one_counter_per_source_and_epoch"),
        ]

    def __str__(self) -> str:
        return f"{self.meter_id} epoch {self.epoch}"


class Freeze(models.Model):
    """While it stands, nothing that the organisation earned becomes payable, and it can hold no more money."""

    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="freezes")
    reason = models.CharField(max_length=200)
    ref = models.CharField(max_length=80)  # what it is for: a dispute, or who decided it
    since = models.DateTimeField()
    until = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["organisation", "ref"], name="one_freeze_for_one_reason"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["organisation"], name="freeze_that_stands", condition=Q(until=None)),
        ]

    def __str__(self) -> str:
        return f"{self.organisation_id}: {self.reason}"


class CorrectionState(models.TextChoices):
    ASKED = "asked", "Waits for a second person"
    POSTED = "posted", "Posted"
    REFUSED = "refused", "Refused"


CORRECTION_MACHINE = Machine(
    "correction",
    {
        CorrectionState.ASKED: {CorrectionState.POSTED, CorrectionState.REFUSED},
        CorrectionState.POSTED: set(),
        CorrectionState.REFUSED: set(),
    },
)


class Correction(models.Model):
    """What a transfer moved, moved back as far as two people agree."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=correction_id, editable=False)
    original = models.ForeignKey(Transfer, on_delete=models.PROTECT, related_name="corrections")
    amount_uusd = models.BigIntegerField()
    reason = models.CharField(max_length=300)
    state = models.CharField(max_length=8, choices=CorrectionState.choices, default=CorrectionState.ASKED)
    asked_by = models.CharField(max_length=200)
    asked_at = models.DateTimeField()
    decided_by = models.CharField(max_length=200, blank=True)
    decided_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="correction_amount_positive", condition=Q(amount_uusd__gt=0)),
            models.CheckConstraint(
                name="correction_by_two_people", condition=~Q(state=CorrectionState.POSTED, decided_by=F("asked_by"))
            ),
            models.CheckConstraint(
                name="correction_is_decided_by_somebody",
                condition=Q(state=CorrectionState.ASKED, decided_at=None)
                | (~Q(decided_by="") & Q(decided_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} of {self.original_id}"


class TopUpState(models.TextChoices):
    CREATED = "created", "Opening the payment page"
    PENDING = "pending", "Waiting for the payment"
    PAID = "paid", "Paid"
    FAILED = "failed", "Failed"
    EXPIRED = "expired", "Expired unpaid"


# Money that came is always taken: no state but `paid` is closed to it.
TOP_UP_MACHINE = Machine(
    "top-up",
    {
        TopUpState.CREATED: {TopUpState.PENDING, TopUpState.PAID, TopUpState.FAILED, TopUpState.EXPIRED},
        TopUpState.PENDING: {TopUpState.PAID, TopUpState.FAILED, TopUpState.EXPIRED},
        TopUpState.FAILED: {TopUpState.PAID},
        TopUpState.EXPIRED: {TopUpState.PAID},
        TopUpState.PAID: set(),
    },
)


class TopUp(models.Model):
    """Money that somebody wants to pay in. Its id names the payment to the provider, so it is opened once."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=top_up_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="top_ups")
    amount_uusd = models.BigIntegerField()
    state = models.CharField(max_length=8, choices=TopUpState.choices, default=TopUpState.CREATED)
    checkout_id = models.CharField(max_length=255, null=True, unique=True)  # noqa: DJ001 - unique once it is known
    payment_ref = models.CharField(max_length=255, null=True, unique=True)  # noqa: DJ001 - of what was paid; as above
    pay_url = models.TextField(default="")
    problem = models.CharField(max_length=200, default="")  # why it is not paid, in words for the customer
    created_by = models.CharField(max_length=200)  # the actor's name
    created_at = models.DateTimeField()
    checked_at = models.DateTimeField()  # when the provider was last asked
    settled_at = models.DateTimeField(null=True)
    available_at = models.DateTimeField(null=True)  # when we could pay out of it

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["organisation", "-created_at"], name="top_up_by_organisation"),
            models.Index(
                fields=["checked_at"],
                name="top_up_not_available",
                condition=Q(state=TopUpState.PAID, available_at=None),
            ),
            models.Index(
                fields=["checked_at"],
                name="top_up_open",
                condition=Q(state__in=[TopUpState.CREATED, TopUpState.PENDING]),
            ),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="top_up_amount",
                condition=Q(amount_uusd__gte=TOP_UP_LEAST_UUSD, amount_uusd__lte=TOP_UP_MOST_UUSD)
                & Q(Exact(Mod("amount_uusd", UUSD_PER_CENT), 0)),
            ),
            models.CheckConstraint(
                name="top_up_paid_names_its_payment",
                condition=~Q(state=TopUpState.PAID) | Q(payment_ref__isnull=False, settled_at__isnull=False),
            ),
            models.CheckConstraint(
                name="top_up_pending_has_a_page", condition=~Q(state=TopUpState.PENDING) | Q(checkout_id__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.state}"


class StripeEvent(models.Model):
    """The inbox of webhooks: each event once, kept until it was acted on."""

    id = models.CharField(primary_key=True, max_length=255)  # the provider's
    kind = models.CharField(max_length=100)
    object_id = models.CharField(max_length=255)
    order_ref = models.CharField(max_length=255, default="")
    received_at = models.DateTimeField()
    due_at = models.DateTimeField()
    processed_at = models.DateTimeField(null=True)
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, default="")

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["due_at"], name="stripe_event_unprocessed", condition=Q(processed_at=None)),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class SellerAccount(models.Model):
    """An organisation's account at the payment provider, where what it earned is paid to."""

    organisation = models.OneToOneField(
        Organisation, primary_key=True, on_delete=models.PROTECT, related_name="seller_account"
    )
    account_id = models.CharField(max_length=255, null=True, unique=True)  # noqa: DJ001 - unique once it is known
    details_submitted = models.BooleanField(default=False)
    payouts_enabled = models.BooleanField(default=False)
    needs = models.JSONField(default=list)  # what the provider still asks for, in its words
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    checked_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.organisation_id} {self.account_id}"


class PayoutState(models.TextChoices):
    CREATED = "created", "On its way"
    PAID = "paid", "Paid"
    FAILED = "failed", "Refused"
    REVERSED = "reversed", "Taken back"


PAYOUT_MACHINE = Machine(
    "payout",
    {
        PayoutState.CREATED: {PayoutState.PAID, PayoutState.FAILED},
        PayoutState.PAID: {PayoutState.REVERSED},
        PayoutState.FAILED: set(),
        PayoutState.REVERSED: set(),
    },
)


class Payout(models.Model):
    """What was earned, on its way to who earned it. Its id is the idempotency key and names the transfer's group."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=payout_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="payouts")
    amount_uusd = models.BigIntegerField()
    state = models.CharField(max_length=8, choices=PayoutState.choices, default=PayoutState.CREATED)
    transfer_id = models.CharField(max_length=255, null=True, unique=True)  # noqa: DJ001 - unique once it is known
    reversed_uusd = models.BigIntegerField(default=0)
    problem = models.CharField(max_length=200, default="")
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    checked_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["organisation", "-created_at"], name="payout_by_organisation")]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["organisation"], name="one_payout_on_its_way", condition=Q(state=PayoutState.CREATED)
            ),
            models.CheckConstraint(
                name="payout_of_whole_cents",
                condition=Q(amount_uusd__gt=0) & Q(Exact(Mod("amount_uusd", UUSD_PER_CENT), 0)),
            ),
            models.CheckConstraint(
                name="payout_paid_names_its_transfer",
                condition=~Q(state__in=[PayoutState.PAID, PayoutState.REVERSED])
                | Q(transfer_id__isnull=False, settled_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.state}"


class CardRefundState(models.TextChoices):
    CREATED = "created", "On its way"
    PAID = "paid", "Returned"
    FAILED = "failed", "Refused"


CARD_REFUND_MACHINE = Machine(
    "card refund",
    {
        CardRefundState.CREATED: {CardRefundState.PAID, CardRefundState.FAILED},
        CardRefundState.PAID: set(),
        CardRefundState.FAILED: set(),
    },
)


class CardRefund(models.Model):
    """Cash that was not spent, back to the card it came from. Its id is the idempotency key."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=card_refund_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="card_refunds")
    top_up = models.ForeignKey(TopUp, on_delete=models.PROTECT, related_name="refunds")
    amount_uusd = models.BigIntegerField()
    state = models.CharField(max_length=8, choices=CardRefundState.choices, default=CardRefundState.CREATED)
    refund_id = models.CharField(max_length=255, null=True, unique=True)  # noqa: DJ001 - unique once it is known
    problem = models.CharField(max_length=200, default="")
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    checked_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["organisation", "-created_at"], name="card_refund_by_organisation")]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="card_refund_of_whole_cents",
                condition=Q(amount_uusd__gt=0) & Q(Exact(Mod("amount_uusd", UUSD_PER_CENT), 0)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.state}"


class DisputeState(models.TextChoices):
    OPEN = "open", "Open"
    WON = "won", "Won"
    LOST = "lost", "Lost"


DISPUTE_MACHINE = Machine(
    "dispute",
    {DisputeState.OPEN: {DisputeState.WON, DisputeState.LOST}, DisputeState.WON: set(), DisputeState.LOST: set()},
)


class PaymentDispute(models.Model):
    """A payment that its card's holder disputes: the bank takes the money, until the dispute is won."""

    id = models.CharField(primary_key=True, max_length=255)  # the provider's
    top_up = models.ForeignKey(TopUp, on_delete=models.PROTECT, related_name="disputes")
    organisation = models.ForeignKey(Organisation, on_delete=models.PROTECT, related_name="payment_disputes")
    amount_uusd = models.BigIntegerField()
    from_cash_uusd = models.BigIntegerField()
    owed_uusd = models.BigIntegerField()
    state = models.CharField(max_length=4, choices=DisputeState.choices, default=DisputeState.OPEN)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="dispute_is_paid_by_somebody",
                condition=Q(amount_uusd=F("from_cash_uusd") + F("owed_uusd"), from_cash_uusd__gte=0, owed_uusd__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.state}"


class LedgerCheck(models.Model):
    """One run of the audit, kept so that one can see since when something is wrong."""

    ran_at = models.DateTimeField(db_index=True)
    took_ms = models.PositiveIntegerField()
    by = models.CharField(max_length=200)
    # Of each that found something: {"invariant", "count", "subjects": the first few of them}.
    broken = models.JSONField(default=list)
    alarms = models.JSONField(default=list)

    def __str__(self) -> str:
        return f"{self.ran_at:%Y-%m-%d %H:%M}: {len(self.broken)} broken"
