"""The page of a class: what of one GPU is offered in the coming week, at what price, what is bid, and what was paid.

Invariant: open to everyone, names nobody, and every picture is a table too for whoever cannot see it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from marketplace.catalog.index import listed_index
from marketplace.core.clock import database_now, minute_start
from marketplace.trading import market_reads
from marketplace.trading.book import earliest_sale_min
from marketplace.trading.depth import Supply
from marketplace.trading.market_api import fill_body
from marketplace.trading.market_chart import depth_picture, midnights, price_picture, supply_bands

DAYS = 30
TRADES_SHOWN = 15
WINDOW_H = 24
CHANNELS_SHOWN = 12


@require_safe
def class_market(request: HttpRequest, gpu_id: str) -> HttpResponse:
    now = database_now()
    gpu = market_reads.gpu_of(gpu_id)
    supply = market_reads.supply_of(gpu, market_reads.WEEK_H, now)
    start_min = earliest_sale_min(now) + 1
    asks, bids = market_reads.depth(gpu, start_min, start_min + WINDOW_H * 60, now)
    days = market_reads.days_of(gpu, DAYS, now)
    listed = listed_index(gpu.pk, DAYS, now)
    context = {
        "gpu": gpu,
        "bands": supply_bands(supply),
        "most": supply.most,
        "midnights": midnights(len(supply.hours), supply.start_min),
        "by_day": _by_day(supply),
        "prices": supply.prices,
        "asks": asks,
        "bids": bids,
        "depth": depth_picture(asks, bids),
        "window_h": WINDOW_H,
        "days": days[::-1],
        "paid": price_picture(
            [(d.low_uusd_per_gpu_hour, d.average_uusd_per_gpu_hour, d.high_uusd_per_gpu_hour) for d in days]
        ),
        "listed": listed[::-1],
        "listed_picture": price_picture(
            [(d.p10_uusd_per_gpu_hour, d.median_uusd_per_gpu_hour, d.p90_uusd_per_gpu_hour) for d in listed]
        ),
        "trades": [_trade(row) for row in market_reads.trades(gpu.pk)[:TRADES_SHOWN]],
        "channels": market_reads.spread_by_channel(gpu)[:CHANNELS_SHOWN],
        "now": now,
    }
    return render(request, "trading/class_market.html", context)


def _by_day(supply: Supply) -> list[tuple[datetime, list[int]]]:
    """The least of each day's hours, at or below each price: what one could count on."""
    days: dict[int, list[tuple[int, ...]]] = {}
    for number, row in enumerate(supply.hours):
        days.setdefault((supply.start_min + number * 60) // 1440, []).append(row)
    return [
        (minute_start(day * 1440), [min(row[level] for row in rows) for level in range(len(supply.prices))])
        for day, rows in sorted(days.items())
    ]


def _trade(row: Any) -> dict[str, Any]:
    return {**fill_body(row), "kind": row.get_kind_display()}
