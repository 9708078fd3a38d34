"""What others may do with leases: quote, rent, extend, end, settle."""

from marketplace.trading.services.ending import Swept, end_lease, lease_done, settle, sweep_leases
from marketplace.trading.services.quoting import Quote, Reason, quote
from marketplace.trading.services.renting import Wish, extend, rent

__all__ = [
    "Quote",
    "Reason",
    "Swept",
    "Wish",
    "end_lease",
    "extend",
    "lease_done",
    "quote",
    "rent",
    "settle",
    "sweep_leases",
]
