"""Freezes: while one stands, an organisation's earnings stay where they are and it can hold no more money.

Invariant: one freeze for one reason, however often it is asked for; lifting one leaves the others.
"""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.db.models import QuerySet

from marketplace.accounts.audit import record
from marketplace.accounts.models import Organisation
from marketplace.billing.models import Freeze


@transaction.atomic
def freeze(organisation: Organisation, *, reason: str, ref: str, by: str, now: datetime) -> Freeze:
    row, new = Freeze.objects.get_or_create(
        organisation=organisation, ref=ref, defaults={"reason": reason[:200], "since": now}
    )
    if new:
        record(organisation, by, "organisation.frozen", ref, reason=reason)
    return row


@transaction.atomic
def thaw(organisation: Organisation, *, ref: str, by: str, now: datetime) -> None:
    if Freeze.objects.filter(organisation=organisation, ref=ref, until=None).update(until=now):
        record(organisation, by, "organisation.thawed", ref)


def standing() -> QuerySet[Freeze]:
    return Freeze.objects.filter(until=None)


def is_frozen(organisation: Organisation) -> bool:
    return standing().filter(organisation=organisation).exists()
