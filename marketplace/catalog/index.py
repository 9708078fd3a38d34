"""What others asked for a GPU, day by day: a tenth, half and nine tenths asked no more than that.

Invariant: the same cards have one vote a day, their lowest price, however many channels or slices list them; a quantile
is a price that somebody asked (the nearest rank; Hyndman and Fan, 1996, definition 1); a day on which nobody is known
to have asked is missing, and not nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db import connection

from marketplace.catalog.models import GpuModel, PricingModel
from marketplace.core.errors import NotFound

DAYS_MAX = 92
ON_DEMAND = (PricingModel.ON_DEMAND,)
SPOT = (PricingModel.SPOT_FIXED, PricingModel.SPOT_BID)


@dataclass(frozen=True)
class IndexDay:
    day: date
    offers: int
    p10_uusd_per_gpu_hour: int
    median_uusd_per_gpu_hour: int
    p90_uusd_per_gpu_hour: int


def listed_index(gpu_id: str, days: int, now: datetime, pricing: tuple[str, ...] = ON_DEMAND) -> list[IndexDay]:
    """Of the last `days` UTC days, the day in progress included. An offer counts from its first price until it was
    withdrawn or its channel's freshness ran out, at the price it had at the end of the day. NotFound: no such GPU."""
    if not GpuModel.objects.filter(pk=gpu_id).exists():
        raise NotFound("there is no such GPU")
    last = now.date()
    first = last - timedelta(days=days - 1)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH asked AS (
                SELECT d.day::date AS day, o.dedupe_group, min(p.price) AS price
                  FROM generate_series(%s::timestamptz, %s::timestamptz, interval '1 day') AS d(day)
                 CROSS JOIN catalog_offer o
                  JOIN catalog_channel c ON c.slug = o.channel_id
                  JOIN LATERAL (
                       SELECT price_uusd_per_gpu_hour AS price FROM catalog_pricechange h
                        WHERE h.offer_id = o.offer_uid AND h.observed_at < d.day + interval '1 day'
                        ORDER BY h.observed_at DESC LIMIT 1) p ON p.price IS NOT NULL
                 WHERE o.gpu_id = %s AND o.quarantine_reason = '' AND o.pricing_model = ANY(%s)
                   AND coalesce(o.withdrawn_at, o.observed_at + make_interval(secs => c.freshness_s)) >= d.day
                 GROUP BY 1, 2)
            SELECT day, count(*), percentile_disc(0.1) WITHIN GROUP (ORDER BY price),
                   percentile_disc(0.5) WITHIN GROUP (ORDER BY price),
                   percentile_disc(0.9) WITHIN GROUP (ORDER BY price)
              FROM asked GROUP BY day ORDER BY day
            """,
            [_midnight(first), _midnight(last), gpu_id, [str(each) for each in pricing]],
        )
        return [IndexDay(*row) for row in cursor.fetchall()]


def _midnight(day: date) -> str:
    return f"{day.isoformat()} 00:00+00"
