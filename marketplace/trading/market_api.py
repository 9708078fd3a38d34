"""The market over REST: classes, depth, supply, trades and what was paid by day; and what the caller holds.

Invariant: the market is open to everyone and names nobody; positions are the caller's own.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import generics, serializers
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import Action, current_actor, demand
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.core.errors import InvalidInput
from marketplace.core.ids import LENGTH
from marketplace.trading import market_reads
from marketplace.trading.api import MarketPagination
from marketplace.trading.models import Contract, ContractKind
from marketplace.trading.windows import snapped

HOUR = timedelta(hours=1)


class ClassOut(serializers.Serializer[Any]):
    gpu = serializers.CharField(help_text="Canonical id.")
    gpu_name = serializers.CharField()
    free_gpus = serializers.IntegerField(help_text="Offered for an hour from ten minutes on, at any price.")
    ask_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True, help_text="The lowest.")
    bid_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True, help_text="The highest that stands.")
    last_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True, help_text="Of the last trade.")


class WindowQuery(serializers.Serializer[Any]):
    start_at = serializers.DateTimeField(required=False, help_text="By default the next minute.")
    end_at = serializers.DateTimeField(required=False, help_text="By default an hour later.")


class LevelOut(serializers.Serializer[Any]):
    price_uusd_per_gpu_hour = serializers.IntegerField()
    gpus = serializers.IntegerField(help_text="At this price.")
    total_gpus = serializers.IntegerField(help_text="At this price or a better one.")


class DepthOut(serializers.Serializer[Any]):
    gpu = serializers.CharField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()
    asks = LevelOut(many=True, help_text="What could be had for all of the window, the cheapest first.")
    bids = LevelOut(many=True, help_text="What is wanted within it, the dearest first.")


class SupplyQuery(serializers.Serializer[Any]):
    hours = serializers.IntegerField(min_value=1, max_value=market_reads.HOURS_MAX, default=market_reads.WEEK_H)


class SupplyOut(serializers.Serializer[Any]):
    gpu = serializers.CharField()
    start_at = serializers.DateTimeField(help_text="The hour in progress.")
    prices_uusd_per_gpu_hour = serializers.ListField(child=serializers.IntegerField())
    gpus = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        help_text="For each hour, the GPUs offered throughout it at or below each of the prices.",
    )


class FillQuery(serializers.Serializer[Any]):
    gpu = serializers.CharField(required=False, max_length=LENGTH)
    since = serializers.DateTimeField(required=False, help_text="Included.")
    until = serializers.DateTimeField(required=False, help_text="Not included.")


class FillOut(serializers.Serializer[Any]):
    traded_at = serializers.DateTimeField()
    kind = serializers.ChoiceField(choices=[(kind.value, kind.label) for kind in market_reads.TRADES])
    gpu = serializers.CharField()
    gpus = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()
    price_uusd_per_gpu_hour = serializers.IntegerField()


class DaysQuery(serializers.Serializer[Any]):
    gpu = serializers.CharField(max_length=LENGTH)
    days = serializers.IntegerField(min_value=1, max_value=market_reads.DAYS_MAX, default=30)


class DayOut(serializers.Serializer[Any]):
    day = serializers.DateField(help_text="In UTC.")
    average_uusd_per_gpu_hour = serializers.IntegerField(help_text="Weighted by GPU-minutes.")
    low_uusd_per_gpu_hour = serializers.IntegerField()
    high_uusd_per_gpu_hour = serializers.IntegerField()
    gpu_min = serializers.IntegerField(help_text="GPU-minutes traded.")


class PieceOut(serializers.Serializer[Any]):
    gpus = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()


class PositionOut(serializers.Serializer[Any]):
    sku_id = serializers.CharField()
    island_id = serializers.CharField()
    gpu = serializers.CharField()
    pieces = PieceOut(many=True, help_text="What is held from now on, without the times at which it is nothing.")


class ClassesView(APIView):
    permission_classes = [AllowAny]

    @extend_schema(operation_id="market_list", responses=ClassOut(many=True))
    def get(self, request: Request) -> Response:
        """Every GPU that is let on our islands, at a glance."""
        rows = market_reads.summaries(database_now())
        return Response([{**asdict(row), "gpu": row.gpu.pk, "gpu_name": row.gpu.name} for row in rows])


class DepthView(APIView):
    permission_classes = [AllowAny]

    @extend_schema(operation_id="market_depth", parameters=[WindowQuery], responses=DepthOut)
    def get(self, request: Request, gpu: str) -> Response:
        """How many GPUs could be had for a window at what price, and what is bid for."""
        found = market_reads.gpu_of(gpu)
        query = WindowQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        now = database_now()
        start_at: datetime = query.validated_data.get("start_at") or minute_start(minute_of(now) + 1)
        window = snapped(start_at, query.validated_data.get("end_at") or start_at + HOUR, now)
        asks, bids = market_reads.depth(found, window.start_min, window.end_min, now)
        return Response(
            {
                "gpu": found.pk,
                "start_at": minute_start(window.start_min),
                "end_at": minute_start(window.end_min),
                "asks": [asdict(level) for level in asks],
                "bids": [asdict(level) for level in bids],
            }
        )


class SupplyView(APIView):
    permission_classes = [AllowAny]

    @extend_schema(operation_id="market_supply", parameters=[SupplyQuery], responses=SupplyOut)
    def get(self, request: Request, gpu: str) -> Response:
        """The GPUs offered in each of the coming hours, by price."""
        found = market_reads.gpu_of(gpu)
        query = SupplyQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        seen = market_reads.supply_of(found, query.validated_data["hours"], database_now())
        return Response(
            {
                "gpu": found.pk,
                "start_at": minute_start(seen.start_min),
                "prices_uusd_per_gpu_hour": seen.prices,
                "gpus": seen.hours,
            }
        )


class FillsView(generics.GenericAPIView[Contract]):
    permission_classes = [AllowAny]
    serializer_class = FillOut
    pagination_class = MarketPagination
    queryset = Contract.objects.none()

    @extend_schema(operation_id="fills_list", parameters=[FillQuery], responses=FillOut(many=True))
    def get(self, request: Request) -> Response:
        """What was traded, newest first; by whom is nobody's business."""
        query = FillQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        asked = query.validated_data
        if "since" in asked and "until" in asked and asked["since"] >= asked["until"]:
            raise InvalidInput.at("until", "must be after its beginning")
        rows = market_reads.trades(asked.get("gpu"))
        if "since" in asked:
            rows = rows.filter(created_at__gte=asked["since"])
        if "until" in asked:
            rows = rows.filter(created_at__lt=asked["until"])
        page = self.paginate_queryset(rows) or []
        return self.get_paginated_response([fill_body(row) for row in page])


class DaysView(APIView):
    permission_classes = [AllowAny]

    @extend_schema(operation_id="indices_list", parameters=[DaysQuery], responses=DayOut(many=True))
    def get(self, request: Request) -> Response:
        """What was paid for a GPU on our islands, day by day."""
        query = DaysQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        found = market_reads.gpu_of(query.validated_data["gpu"])
        days = market_reads.days_of(found, query.validated_data["days"], database_now())
        return Response([asdict(day) for day in days])


class PositionsView(APIView):
    @extend_schema(operation_id="positions_list", responses=PositionOut(many=True))
    def get(self, request: Request) -> Response:
        """What the organisation holds from now on, as step functions of GPUs over time."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        return Response(market_reads.positions_of(actor.organisation, database_now()))


def fill_body(row: Contract) -> dict[str, Any]:
    return {
        "traded_at": row.created_at,
        "kind": ContractKind(row.kind).value,
        "gpu": row.sku.gpu_id,
        "gpus": row.lots * row.sku.gpus_per_lot,
        "start_at": minute_start(row.start_min),
        "end_at": minute_start(row.end_min),
        "price_uusd_per_gpu_hour": row.price_uusd_per_gpu_hour,
    }
