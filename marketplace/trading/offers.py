"""What the market page shows of our own islands, above what others list.

Invariant: reads only, in four queries however many islands there are.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Case, When

from marketplace.core.clock import minute_of, minute_start
from marketplace.fleet.models import IslandState
from marketplace.trading import selectors
from marketplace.trading.selectors import SORTS

SHOWN = 25
SILENT = (IslandState.LOST, IslandState.REGISTERED)


def own_offers(now: datetime) -> dict[str, Any]:
    """For `templates/trading/_own_offers.html`: islands that are online first, cheapest first; how many are not shown
    because their agents are silent."""
    online_first = Case(When(state=IslandState.ONLINE, then=0), default=1)
    offered = selectors.islands_on_offer(now)
    heard = offered.exclude(state__in=SILENT)
    islands = list(heard.order_by(online_first, *SORTS["price"])[:SHOWN])
    free = selectors.free_now(islands, minute_of(now))
    rows = []
    for island in islands:
        until_min = free[island.pk].until_min
        until = None if until_min is None else minute_start(until_min)
        rows.append({"island": island, "free": free[island.pk], "free_until": until})
    return {"rows": rows, "silent": offered.filter(state__in=SILENT).count()}
