"""Orders over REST: preview, place, list, look at, amend, cancel; to buy, and to sell on a part of a lease.

Invariant: a preview writes nothing; placing carries an Idempotency-Key and happens once; another organisation's order
is 404. Times that are sent are snapped to whole minutes and returned as snapped.
"""

from __future__ import annotations

from typing import Any

from django.urls import reverse
from drf_spectacular.utils import extend_schema
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import Actor, current_actor
from marketplace.accounts.idempotency import idempotent
from marketplace.core.clock import database_now, minute_start
from marketplace.core.errors import FieldProblem, InvalidInput
from marketplace.core.ids import LENGTH
from marketplace.trading import selectors, services
from marketplace.trading.api import KEY, MONEY_MAX, LeaseOut, MarketPagination, lease_bodies
from marketplace.trading.models import Colocation, Lease, Order, OrderState, Side, Tif
from marketplace.trading.orders import GPUS_MAX, MIN_BLOCK_MIN, Wanted
from marketplace.trading.selectors import offered_parts

MINUTES_MAX = 366 * 24 * 60


# What an order to sell says. The rest is for orders to buy.
OF_A_SALE = frozenset(
    {"side", "lease_id", "gpus", "start_at", "end_at", "limit_uusd_per_gpu_hour", "min_block_min", "expires_at"}
)


class OrderIn(serializers.Serializer[Any]):
    side = serializers.ChoiceField(choices=Side.choices, default=Side.BUY)
    lease_id = serializers.CharField(
        max_length=LENGTH,
        required=False,
        help_text="To sell: the lease of which a part is for sale. It stays yours until somebody buys it.",
    )
    quote_id = serializers.CharField(
        max_length=500,
        required=False,
        help_text="Of a preview of the same order: it is placed as it was shown or better, or not at all.",
    )
    island_id = serializers.CharField(max_length=LENGTH, required=False, allow_null=True, help_text="Or `gpu`.")
    gpu = serializers.CharField(
        max_length=LENGTH, required=False, allow_null=True, help_text="Any island with this GPU, by its canonical id."
    )
    gpus = serializers.IntegerField(min_value=1, max_value=GPUS_MAX)
    gpus_per_lot = serializers.IntegerField(
        min_value=1, max_value=1024, default=1, help_text="8 for whole nodes of eight; an island has its own."
    )
    start_at = serializers.DateTimeField(required=False, allow_null=True, help_text="Left out: now.")
    end_at = serializers.DateTimeField(
        required=False, help_text="To buy, needed. To sell, left out: to the lease's end."
    )
    duration_min = serializers.IntegerField(
        min_value=1,
        max_value=MINUTES_MAX,
        required=False,
        allow_null=True,
        help_text="A block of that length, wherever in the window it is cheapest.",
    )
    limit_uusd_per_gpu_hour = serializers.IntegerField(
        min_value=60, max_value=MONEY_MAX, help_text="On average at most; to sell, at least. A multiple of 60."
    )
    tif = serializers.ChoiceField(choices=Tif.choices, default=Tif.GTC)
    colocation = serializers.ChoiceField(choices=Colocation.choices, default=Colocation.SAME_ISLAND)
    quorum_gpus = serializers.IntegerField(
        min_value=1,
        max_value=GPUS_MAX,
        required=False,
        allow_null=True,
        help_text="A basket: at least so many over several islands or none, beyond it what the limit bears.",
    )
    min_gpus_per_island = serializers.IntegerField(
        min_value=1, max_value=GPUS_MAX, required=False, allow_null=True, help_text="Of a basket."
    )
    allow_partial_gpus = serializers.BooleanField(default=False)
    allow_partial_time = serializers.BooleanField(default=False)
    min_block_min = serializers.IntegerField(
        min_value=1, max_value=MINUTES_MAX, default=MIN_BLOCK_MIN, help_text="The shortest part in time worth having."
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True)

    def wish(self, data: Any) -> Wanted | services.Offer:
        """What is asked for: GPUs wanted, or a part of a lease on offer."""
        given = set(data) if isinstance(data, dict) else set()
        problems = [
            FieldProblem(str(name), "there is no such field") for name in sorted(map(str, given - set(self.fields)))
        ]
        selling = isinstance(data, dict) and data.get("side") == Side.SELL
        if selling:
            problems += [
                FieldProblem(name, "is for orders to buy") for name in sorted(given & set(self.fields) - OF_A_SALE)
            ]
            if not data.get("lease_id"):
                problems.append(FieldProblem("lease_id", "name the lease of which a part is for sale"))
        elif isinstance(data, dict):
            if "lease_id" in data:
                problems.append(FieldProblem("lease_id", "is for orders to sell"))
            if not data.get("end_at"):
                problems.append(FieldProblem("end_at", "This field is required."))
        if problems:
            raise InvalidInput("some fields are not right", fields=problems)
        self.is_valid(raise_exception=True)
        asked = dict(self.validated_data)
        if asked.pop("side") == Side.BUY:
            asked.pop("quote_id", None)
            return Wanted(**asked)
        return services.Offer(
            lease_id=asked["lease_id"],
            gpus=asked["gpus"],
            limit_uusd_per_gpu_hour=asked["limit_uusd_per_gpu_hour"],
            start_at=asked.get("start_at"),
            end_at=asked.get("end_at"),
            min_block_min=asked["min_block_min"],
            expires_at=asked.get("expires_at"),
        )


class PartOut(serializers.Serializer[Any]):
    """GPUs for a window."""

    gpus = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()


class PlannedLeaseOut(PartOut):
    island_id = serializers.CharField()
    island_name = serializers.CharField()
    price_uusd_per_gpu_hour = serializers.IntegerField()


class ProceedsOut(serializers.Serializer[Any]):
    """What a sale brings if all of it is bought at its price and delivered; it is earned minute by minute."""

    gross_uusd = serializers.IntegerField()
    fee_uusd = serializers.IntegerField(help_text="Ours.")
    net_uusd = serializers.IntegerField()
    paying_uusd = serializers.IntegerField(help_text="What you go on paying for these minutes.")


class OrderPreviewOut(serializers.Serializer[Any]):
    leases = PlannedLeaseOut(many=True, help_text="What would be rented at once.")
    wanted = PartOut(many=True, help_text="What would stand or, by its `tif`, be cancelled.")
    cost_uusd = serializers.IntegerField(help_text="Of those leases, at most.")
    average_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True)
    held_uusd = serializers.IntegerField(help_text="What placing it needs in cash: all of it at the limit.")
    spendable_uusd = serializers.IntegerField()
    quote_id = serializers.CharField(allow_null=True, help_text="Place the order with it to get this or better.")
    quote_expires_at = serializers.DateTimeField(allow_null=True)
    proceeds = ProceedsOut(allow_null=True, help_text="Of an order to sell; null of one to buy.")


class OrderOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    side = serializers.ChoiceField(choices=Side.choices)
    lease_id = serializers.CharField(allow_null=True, help_text="Of an order to sell: the lease it is of.")
    replaces = serializers.CharField(allow_null=True, help_text="The order that this one took the place of.")
    state = serializers.ChoiceField(choices=OrderState.choices)
    reason = serializers.CharField(help_text="Why it closed, in words.")
    island_id = serializers.CharField(allow_null=True)
    gpu = serializers.CharField(allow_null=True)
    gpus = serializers.IntegerField()
    gpus_per_lot = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()
    duration_min = serializers.IntegerField(allow_null=True)
    limit_uusd_per_gpu_hour = serializers.IntegerField()
    tif = serializers.ChoiceField(choices=Tif.choices)
    colocation = serializers.ChoiceField(choices=Colocation.choices)
    quorum_gpus = serializers.IntegerField(allow_null=True)
    min_gpus_per_island = serializers.IntegerField(allow_null=True)
    allow_partial_gpus = serializers.BooleanField()
    allow_partial_time = serializers.BooleanField()
    min_block_min = serializers.IntegerField()
    expires_at = serializers.DateTimeField(allow_null=True)
    wanted = PartOut(many=True, help_text="What it still wants.")
    offered = PartOut(many=True, help_text="What of it is still for sale.")
    held_uusd = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)


class OrderDetailOut(OrderOut):
    leases = LeaseOut(many=True, help_text="That came of an order to buy.")
    sold = PartOut(many=True, help_text="Of an order to sell: what was bought of it.")


class OrderQuery(serializers.Serializer[Any]):
    side = serializers.ChoiceField(choices=Side.choices, required=False)
    state = serializers.ChoiceField(choices=OrderState.choices, required=False)


def order_body(order: Order) -> dict[str, Any]:
    plain = (
        "side",
        "state",
        "reason",
        "island_id",
        "gpus",
        "gpus_per_lot",
        "duration_min",
        "limit_uusd_per_gpu_hour",
        "tif",
        "colocation",
        "quorum_gpus",
        "min_gpus_per_island",
        "allow_partial_gpus",
        "allow_partial_time",
        "min_block_min",
        "expires_at",
        "created_at",
        "closed_at",
    )
    return {
        "id": order.pk,
        **{name: getattr(order, name) for name in plain},
        "lease_id": order.of_lease_id,
        "replaces": order.replaces_id,
        "gpu": order.gpu_id,
        "start_at": minute_start(order.start_min),
        "end_at": minute_start(order.end_min),
        "wanted": [_part(*row[:3]) for row in order.wanted],
        "offered": [_part(*part) for part in offered_parts(order)],
        "held_uusd": services.most_uusd(order) if order.state == OrderState.OPEN else 0,
    }


def _detail(order: Order) -> dict[str, Any]:
    leases = Lease.objects.filter(order=order).select_related("island__site", "sku__gpu").order_by("start_min", "id")
    sold = Lease.objects.filter(sale=order).order_by("start_min", "id").values_list("gpus", "start_min", "end_min")
    return {**order_body(order), "leases": lease_bodies(leases), "sold": [_part(*part) for part in sold]}


def _part(gpus: int, start_min: int, end_min: int) -> dict[str, Any]:
    return {"gpus": gpus, "start_at": minute_start(start_min), "end_at": minute_start(end_min)}


class OrdersView(generics.GenericAPIView[Order]):
    serializer_class = OrderOut
    pagination_class = MarketPagination
    queryset = Order.objects.none()

    @extend_schema(operation_id="orders_list", parameters=[OrderQuery], responses=OrderOut(many=True))
    def get(self, request: Request) -> Response:
        """The organisation's orders, newest first."""
        form = OrderQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        found = selectors.orders_of(current_actor(request).organisation).filter(**form.validated_data)
        page = self.paginate_queryset(found) or []
        return self.get_paginated_response([order_body(order) for order in page])

    @extend_schema(operation_id="orders_create", parameters=[KEY], request=OrderIn, responses={201: OrderDetailOut})
    def post(self, request: Request) -> Response:
        """Bid for GPUs: all of it at the limit is held; what the book has is rented at once, the cheapest first. Or put
        a part of a lease up for sale: it stays yours until somebody buys it."""
        actor = current_actor(request)
        form = OrderIn(data=request.data)
        wish = form.wish(request.data)
        quote_id = form.validated_data.get("quote_id")

        def handler() -> Response:
            if isinstance(wish, services.Offer):
                order = services.place_sale(actor, wish, database_now())
            else:
                order = services.place_order(actor, wish, database_now(), quote_id=quote_id)
            headers = {"Location": reverse("trading:api_order", args=[order.pk])}
            return Response(_detail(order), status=status.HTTP_201_CREATED, headers=headers)

        return idempotent(request, "orders.create", request.data, handler)


class OrderPreviewView(APIView):
    @extend_schema(operation_id="orders_preview", request=OrderIn, responses=OrderPreviewOut)
    def post(self, request: Request) -> Response:
        """What placing it would rent now, at which price, and what it would hold; to sell, what it would bring. Writes
        nothing and needs no key."""
        actor = current_actor(request)
        wish = OrderIn(data=request.data).wish(request.data)
        now = database_now()
        if isinstance(wish, services.Offer):
            return Response(_sale_preview_body(services.preview_sale(actor, wish, now), actor))
        seen = services.preview_order(actor, wish, now)
        quote = services.give_quote(actor, wish, seen, now)
        leases = [
            {
                **_part(len(lot.slots) * seen.order.gpus_per_lot, lot.start_min, lot.end_min),
                "island_id": lot.island_id,
                "island_name": seen.islands[lot.island_id].name,
                "price_uusd_per_gpu_hour": lot.price_uusd_per_gpu_hour,
            }
            for lot in seen.plan.lots
        ]
        return Response(
            {
                "leases": leases,
                "wanted": [_part(*row[:3]) for row in seen.plan.wanted],
                "cost_uusd": seen.cost_uusd,
                "average_uusd_per_gpu_hour": seen.average_uusd_per_gpu_hour,
                "held_uusd": seen.held_uusd,
                "spendable_uusd": seen.spendable_uusd,
                "quote_id": quote.id,
                "quote_expires_at": quote.expires_at,
                "proceeds": None,
            }
        )


def _sale_preview_body(seen: services.SalePreview, actor: Actor) -> dict[str, Any]:
    names = ("gross_uusd", "fee_uusd", "net_uusd", "paying_uusd")
    return {
        "leases": [],
        "wanted": [],
        "cost_uusd": 0,
        "average_uusd_per_gpu_hour": None,
        "held_uusd": 0,
        "spendable_uusd": selectors.spendable_uusd(actor.organisation),
        "quote_id": None,
        "quote_expires_at": None,
        "proceeds": {name: getattr(seen, name) for name in names},
    }


class OrderView(APIView):
    @extend_schema(operation_id="orders_retrieve", responses=OrderDetailOut)
    def get(self, request: Request, order_id: str) -> Response:
        """One order: what it still wants, and the leases that came of it."""
        return Response(_detail(selectors.order_for(current_actor(request).organisation, order_id)))


class OrderAmendIn(serializers.Serializer[Any]):
    limit_uusd_per_gpu_hour = serializers.IntegerField(min_value=60, max_value=MONEY_MAX, required=False)
    expires_at = serializers.DateTimeField(required=False, allow_null=True)


class OrderAmendView(APIView):
    @extend_schema(operation_id="orders_amend", parameters=[KEY], request=OrderAmendIn, responses={201: OrderDetailOut})
    def post(self, request: Request, order_id: str) -> Response:
        """Another price or expiry for what is not filled: the order is cancelled and another takes its place, behind
        those that stood at that price before."""
        actor = current_actor(request)
        form = OrderAmendIn(data=request.data)
        form.is_valid(raise_exception=True)

        def handler() -> Response:
            order = services.amend_order(actor, order_id, services.Change(**form.validated_data), database_now())
            headers = {"Location": reverse("trading:api_order", args=[order.pk])}
            return Response(_detail(order), status=status.HTTP_201_CREATED, headers=headers)

        return idempotent(request, f"orders.amend:{order_id}", request.data, handler)


class OrderCancelView(APIView):
    @extend_schema(operation_id="orders_cancel", request=None, responses=OrderDetailOut)
    def post(self, request: Request, order_id: str) -> Response:
        """Take back what is not filled. The answer says what became of it: it may have been filled before."""
        order = services.cancel_order(current_actor(request), order_id, database_now())
        return Response(_detail(order))
