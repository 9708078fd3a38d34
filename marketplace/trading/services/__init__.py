"""What others may do with leases and orders: quote, rent, extend, end, settle; preview, place, sell, cancel, sweep."""

from marketplace.trading.orders import Change
from marketplace.trading.services.ending import Swept, end_lease, lease_done, settle, sweep_leases
from marketplace.trading.services.ordering import (
    Preview,
    amend_order,
    cancel_order,
    give_quote,
    most_uusd,
    place_order,
    preview_order,
    sweep_orders,
)
from marketplace.trading.services.quoting import Quote, Reason, quote
from marketplace.trading.services.renting import Wish, extend, rent
from marketplace.trading.services.selling import Offer, SalePreview, place_sale, preview_sale

__all__ = [
    "Change",
    "Offer",
    "Preview",
    "Quote",
    "Reason",
    "SalePreview",
    "Swept",
    "Wish",
    "amend_order",
    "cancel_order",
    "end_lease",
    "extend",
    "give_quote",
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
