"""Orders over REST: preview, place, list, look at, cancel.

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

from marketplace.accounts.access import current_actor
from marketplace.accounts.idempotency import idempotent
from marketplace.core.clock import database_now, minute_start
from marketplace.core.errors import FieldProblem, InvalidInput
from marketplace.core.ids import LENGTH
from marketplace.trading import selectors, services
from marketplace.trading.api import KEY, MONEY_MAX, LeaseOut, MarketPagination, lease_bodies
from marketplace.trading.models import Colocation, Lease, Order, OrderState, Tif
from marketplace.trading.orders import GPUS_MAX, MIN_BLOCK_MIN, Wanted

MINUTES_MAX = 366 * 24 * 60


class OrderIn(serializers.Serializer[Any]):
    island_id = serializers.CharField(max_length=LENGTH, required=False, allow_null=True, help_text="Or `gpu`.")
    gpu = serializers.CharField(
        max_length=LENGTH, required=False, allow_null=True, help_text="Any island with this GPU, by its canonical id."
    )
    gpus = serializers.IntegerField(min_value=1, max_value=GPUS_MAX)
    gpus_per_lot = serializers.IntegerField(
        min_value=1, max_value=1024, default=1, help_text="8 for whole nodes of eight; an island has its own."
    )
    start_at = serializers.DateTimeField(required=False, allow_null=True, help_text="Left out: now.")
    end_at = serializers.DateTimeField()
    duration_min = serializers.IntegerField(
        min_value=1,
        max_value=MINUTES_MAX,
        required=False,
        allow_null=True,
        help_text="A block of that length, wherever in the window it is cheapest.",
    )
    limit_uusd_per_gpu_hour = serializers.IntegerField(
        min_value=60, max_value=MONEY_MAX, help_text="On average at most; a multiple of 60."
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

    def wanted(self, data: Any) -> Wanted:
        unknown = sorted(str(name) for name in data if name not in self.fields) if isinstance(data, dict) else []
        if unknown:
            raise InvalidInput(
                "some fields are not right", fields=[FieldProblem(name, "there is no such field") for name in unknown]
            )
        self.is_valid(raise_exception=True)
        return Wanted(**self.validated_data)


class PartOut(serializers.Serializer[Any]):
    """GPUs for a window."""

    gpus = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()


class PlannedLeaseOut(PartOut):
    island_id = serializers.CharField()
    island_name = serializers.CharField()
    price_uusd_per_gpu_hour = serializers.IntegerField()


class OrderPreviewOut(serializers.Serializer[Any]):
    leases = PlannedLeaseOut(many=True, help_text="What would be rented at once.")
    wanted = PartOut(many=True, help_text="What would stand or, by its `tif`, be cancelled.")
    cost_uusd = serializers.IntegerField(help_text="Of those leases, at most.")
    average_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True)
    held_uusd = serializers.IntegerField(help_text="What placing it needs in cash: all of it at the limit.")
    spendable_uusd = serializers.IntegerField()


class OrderOut(serializers.Serializer[Any]):
    id = serializers.CharField()
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
    held_uusd = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)


class OrderDetailOut(OrderOut):
    leases = LeaseOut(many=True)


class OrderQuery(serializers.Serializer[Any]):
    state = serializers.ChoiceField(choices=OrderState.choices, required=False)


def order_body(order: Order) -> dict[str, Any]:
    plain = (
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
        "gpu": order.gpu_id,
        "start_at": minute_start(order.start_min),
        "end_at": minute_start(order.end_min),
        "wanted": [_part(*row[:3]) for row in order.wanted],
        "held_uusd": services.most_uusd(order) if order.state == OrderState.OPEN else 0,
    }


def _detail(order: Order) -> dict[str, Any]:
    leases = Lease.objects.filter(order=order).select_related("island__site", "sku__gpu").order_by("start_min", "id")
    return {**order_body(order), "leases": lease_bodies(leases)}


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
        """Bid for GPUs. All of it at the limit is held; what the book has is rented at once, the cheapest first."""
        actor = current_actor(request)
        wanted = OrderIn(data=request.data).wanted(request.data)

        def handler() -> Response:
            order = services.place_order(actor, wanted, database_now())
            headers = {"Location": reverse("trading:api_order", args=[order.pk])}
            return Response(_detail(order), status=status.HTTP_201_CREATED, headers=headers)

        return idempotent(request, "orders.create", request.data, handler)


class OrderPreviewView(APIView):
    @extend_schema(operation_id="orders_preview", request=OrderIn, responses=OrderPreviewOut)
    def post(self, request: Request) -> Response:
        """What placing it would rent now, at which price, and what it would hold. Writes nothing and needs no key."""
        actor = current_actor(request)
        seen = services.preview_order(actor, OrderIn(data=request.data).wanted(request.data), database_now())
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
            }
        )


class OrderView(APIView):
    @extend_schema(operation_id="orders_retrieve", responses=OrderDetailOut)
    def get(self, request: Request, order_id: str) -> Response:
        """One order: what it still wants, and the leases that came of it."""
        return Response(_detail(selectors.order_for(current_actor(request).organisation, order_id)))


class OrderCancelView(APIView):
    @extend_schema(operation_id="orders_cancel", request=None, responses=OrderDetailOut)
    def post(self, request: Request, order_id: str) -> Response:
        """Take back what is not filled. The answer says what became of it: it may have been filled before."""
        order = services.cancel_order(current_actor(request), order_id, database_now())
        return Response(_detail(order))
