"""What others may do with leases and orders: quote, rent, extend, end, settle; preview, place, sell, cancel, sweep."""

from marketplace.trading.services.ending import Swept, end_lease, lease_done, settle, sweep_leases
from marketplace.trading.services.ordering import (
    Preview,
    cancel_order,
    most_uusd,
    place_order,
    preview_order,
    sweep_orders,
)
from marketplace.trading.services.quoting import Quote, Reason, quote
from marketplace.trading.services.renting import Wish, extend, rent
from marketplace.trading.services.selling import Offer, SalePreview, place_sale, preview_sale

__all__ = [
    "Offer",
    "Preview",
    "Quote",
    "Reason",
    "SalePreview",
    "Swept",
    "Wish",
    "cancel_order",
    "end_lease",
    "extend",
    "lease_done",
    "most_uusd",
    "place_order",
    "place_sale",
    "preview_order",
    "preview_sale",
    "quote",
    "rent",
    "settle",
    "sweep_leases",
    "sweep_orders",
]
