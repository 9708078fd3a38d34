"""The market of a class: what is offered, wanted and traded of one GPU on our own islands.

Invariant: reads only, in a number of queries that does not grow with what it finds; of trades it says what and when,
and never who.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Max, Min, Q, QuerySet, Sum
from django.db.models.functions import TruncDate

from marketplace.accounts.models import Organisation
from marketplace.catalog.models import GpuModel, Offer
from marketplace.catalog.selectors import LISTED
from marketplace.core.clock import minute_of, minute_start
from marketplace.core.errors import NotFound
from marketplace.fleet.models import Island
from marketplace.trading.book import CLOSED, asks_of, earliest_sale_min, slot_of
from marketplace.trading.depth import Day, Level, Offered, Supply, asked, bid, by_day, supply
from marketplace.trading.models import Contract, ContractKind, Order, OrderState, Position, Side
from marketplace.trading.positions import Step, levels
from marketplace.trading.selectors import SELLING_OF, gpus_on_islands

TRADES = (ContractKind.RENT, ContractKind.EXTEND, ContractKind.RESALE)
WEEK_H = 7 * 24
HOURS_MAX = 31 * 24
DAYS_MAX = 366


@dataclass(frozen=True)
class Summary:
    """One class at a glance; None where there is nothing to say."""

    gpu: GpuModel
    free_gpus: int
    ask_uusd_per_gpu_hour: int | None
    bid_uusd_per_gpu_hour: int | None
    last_uusd_per_gpu_hour: int | None


def gpu_of(gpu_id: str) -> GpuModel:
    gpu = GpuModel.objects.filter(pk=gpu_id).first()
    if gpu is None:
        raise NotFound("there is no such GPU")
    return gpu


def offered(gpu_ids: Iterable[str], start_min: int, end_min: int, now: datetime) -> dict[str, list[Offered]]:
    """What is asked of each class within the window, by its id: islands' free time and what holders sell on."""
    selling = Order.objects.filter(SELLING_OF).values("island")
    rows = Island.objects.filter(Q(listed=True) | Q(pk__in=selling), gpu__in=list(gpu_ids)).exclude(state__in=CLOSED)
    islands = list(rows.select_related("gpu", "site", "organisation"))
    by_id = {island.pk: island for island in islands}
    found: dict[str, list[Offered]] = {gpu_id: [] for gpu_id in gpu_ids}
    for ask in asks_of(islands, start_min, end_min, now):
        island = by_id[ask.island]
        found[island.gpu_id].append(
            Offered(
                place=f"{ask.island}/{slot_of(ask.id).number}",
                gpus=ask.lots * island.gpus_per_lot,
                price_uusd_per_gpu_hour=ask.price_uusd_per_gpu_hour,
                start_min=ask.start_min,
                end_min=ask.end_min,
            )
        )
    return found


def depth(gpu: GpuModel, start_min: int, end_min: int, now: datetime) -> tuple[list[Level], list[Level]]:
    """What could be had of the class for the whole window, and what of it is wanted within, by price."""
    return asked(offered([gpu.pk], start_min, end_min, now)[gpu.pk], start_min, end_min), bid(
        _wanted(gpu, start_min, end_min)
    )


def supply_of(gpu: GpuModel, hours: int, now: datetime) -> Supply:
    """From the hour in progress on."""
    start_min = minute_of(now) // 60 * 60
    offers = offered([gpu.pk], start_min, start_min + hours * 60, now)[gpu.pk]
    # The hour in progress is offered for what is left of it.
    begun = [offer if offer.start_min > minute_of(now) + 1 else _from(offer, start_min) for offer in offers]
    return supply(begun, start_min, hours)


def summaries(now: datetime) -> list[Summary]:
    """Every class that is let here, by name."""
    gpus = list(gpus_on_islands())
    now_min = earliest_sale_min(now) + 1
    offers = offered([gpu.pk for gpu in gpus], now_min, now_min + 60, now)
    wanted = Order.objects.filter(state=OrderState.OPEN, side=Side.BUY)
    best = dict(wanted.values_list(F("gpu")).annotate(best=Max("limit_uusd_per_gpu_hour")).filter(gpu__isnull=False))
    newest = trades().order_by("sku__gpu", "-created_at", "-id").distinct("sku__gpu")
    last = dict(newest.values_list("sku__gpu", "price_uusd_per_gpu_hour"))
    found = []
    for gpu in gpus:
        here = asked(offers[gpu.pk], now_min, now_min + 60)
        found.append(
            Summary(
                gpu=gpu,
                free_gpus=here[-1].total_gpus if here else 0,
                ask_uusd_per_gpu_hour=here[0].price_uusd_per_gpu_hour if here else None,
                bid_uusd_per_gpu_hour=best.get(gpu.pk),
                last_uusd_per_gpu_hour=last.get(gpu.pk),
            )
        )
    return found


def trades(gpu_id: str | None = None) -> QuerySet[Contract]:
    """What was traded, newest first."""
    rows = Contract.objects.filter(kind__in=TRADES)
    if gpu_id is not None:
        rows = rows.filter(sku__gpu=gpu_id)
    return rows.select_related("sku").order_by("-created_at", "-id")


def days_of(gpu: GpuModel, days: int, now: datetime) -> list[Day]:
    """What was traded of the class on each of the last days."""
    gpu_min = F("lots") * F("sku__gpus_per_lot") * (F("end_min") - F("start_min"))
    rows = (
        trades(gpu.pk)
        .filter(created_at__gt=now - timedelta(days=days))
        .order_by()
        .annotate(day=TruncDate("created_at"))
        .values_list("day", "price_uusd_per_gpu_hour")
        .annotate(total=Sum(gpu_min))
    )
    return by_day((day.isoformat(), price, total) for day, price, total in rows)


def spread_by_channel(gpu: GpuModel) -> list[dict[str, Any]]:
    """What others ask for the class: the lowest price of each channel, the cheapest first."""
    rows = Offer.objects.filter(LISTED, gpu=gpu, price_uusd_per_gpu_hour__isnull=False).values("channel__name")
    found = rows.annotate(low=Min("price_uusd_per_gpu_hour"), seen=Max("observed_at")).order_by("low", "channel__name")
    return [{"channel": row["channel__name"], "price": row["low"], "seen_at": row["seen"]} for row in found]


def positions_of(organisation: Organisation, now: datetime) -> list[dict[str, Any]]:
    """What the organisation holds from now on, by SKU, as pieces of a step function of GPUs."""
    rows = Position.objects.filter(organisation=organisation, originated=False, end_min__gt=minute_of(now))
    steps: dict[str, list[Step]] = {}
    skus = {}
    for row in rows.select_related("sku").order_by("sku", "start_min", "pk"):
        steps.setdefault(row.sku_id, []).append(Step(row.start_min, row.end_min, row.delta_lots))
        skus[row.sku_id] = row.sku
    found = []
    for sku_id, changes in steps.items():
        sku = skus[sku_id]
        first, last = minute_of(now), max(step.end_min for step in changes)
        pieces = [
            {
                "gpus": piece.delta * sku.gpus_per_lot,
                "start_at": minute_start(piece.start_min),
                "end_at": minute_start(piece.end_min),
            }
            for piece in levels(changes, first, last)
            if piece.delta
        ]
        if pieces:
            found.append({"sku_id": sku_id, "island_id": sku.island_id, "gpu": sku.gpu_id, "pieces": pieces})
    return found


def _wanted(gpu: GpuModel, start_min: int, end_min: int) -> list[tuple[int, int]]:
    rows = Order.objects.filter(Q(gpu=gpu) | Q(island__gpu=gpu), state=OrderState.OPEN, side=Side.BUY)
    rows = rows.filter(start_min__lt=end_min, end_min__gt=start_min)
    return [
        (limit, max((gpus for gpus, *_ in wanted), default=0))
        for limit, wanted in rows.values_list("limit_uusd_per_gpu_hour", "wanted")
    ]


def _from(offer: Offered, start_min: int) -> Offered:
    return Offered(offer.place, offer.gpus, offer.price_uusd_per_gpu_hour, start_min, offer.end_min)
