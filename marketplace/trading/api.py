"""Renting over REST: the islands on offer, readable by everyone, and an organisation's leases.

Invariant: every write carries an Idempotency-Key and happens once; another organisation's lease is 404. Times that are
sent are snapped to whole minutes and returned as snapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.conf import settings
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers, status
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import Action, current_actor, demand
from marketplace.accounts.idempotency import HEADER, idempotent
from marketplace.billing.models import Meter
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.core.errors import FieldProblem, InvalidInput
from marketplace.core.ids import LENGTH
from marketplace.fleet.models import Island, IslandState
from marketplace.trading import selectors, services
from marketplace.trading.models import Lease, LeasePurpose, LeaseState
from marketplace.trading.selectors import Free, IslandFilter

MONEY_MAX = 10**15
KEY = OpenApiParameter(HEADER, str, OpenApiParameter.HEADER, required=True, description="The same key: the same lease.")


class MarketPagination(LimitOffsetPagination):
    default_limit = 50
    max_limit = settings.PAGE_LIMIT


class IslandQuery(serializers.Serializer[Any]):
    gpu = serializers.CharField(required=False, help_text="A canonical id (`h100-sxm-80g`) or a family (`H100`).")
    country = serializers.CharField(required=False, max_length=2, help_text="Two letters, of the site.")
    min_gpus = serializers.IntegerField(required=False, min_value=1, max_value=10**6)
    max_price_uusd_per_gpu_hour = serializers.IntegerField(required=False, min_value=0, max_value=MONEY_MAX)
    preemptible = serializers.BooleanField(required=False)
    simulated = serializers.BooleanField(required=False)
    online = serializers.BooleanField(required=False, help_text="Only islands that can begin now, or only others.")
    sort = serializers.ChoiceField(choices=sorted(selectors.SORTS), default="price")

    def wanted(self, query: dict[str, str]) -> IslandFilter:
        unknown = sorted(set(query) - set(self.fields) - {"limit", "offset"})
        if unknown:
            raise InvalidInput("some filters are unknown", fields=[FieldProblem(name, "unknown") for name in unknown])
        self.is_valid(raise_exception=True)
        return IslandFilter(**self.validated_data)


class IslandOnOfferOut(serializers.Serializer[Any]):
    island_id = serializers.CharField()
    name = serializers.CharField()
    region = serializers.CharField(help_text="Of its site; empty is not stated.")
    country = serializers.CharField(help_text="Two letters; empty is not stated.")
    gpu = serializers.CharField(help_text="Canonical id.")
    gpu_name = serializers.CharField()
    gpu_count = serializers.IntegerField()
    gpus_per_lot = serializers.IntegerField(help_text="Rented together: `gpus` is a multiple of it.")
    free_gpus = serializers.IntegerField(help_text="Nobody holds them now.")
    free_until = serializers.DateTimeField(allow_null=True, help_text="All of them, until then; null: no end stated.")
    price_uusd_per_gpu_hour = serializers.IntegerField()
    available_from = serializers.DateTimeField()
    available_until = serializers.DateTimeField(allow_null=True)
    min_lease_min = serializers.IntegerField()
    wan_up_mbps = serializers.IntegerField(allow_null=True)
    wan_down_mbps = serializers.IntegerField(allow_null=True)
    preemptible = serializers.BooleanField()
    preempt_notice_s = serializers.IntegerField(allow_null=True)
    simulated = serializers.BooleanField()
    state = serializers.ChoiceField(choices=IslandState.choices)
    state_since = serializers.DateTimeField()


def island_body(island: Island, free: Free) -> dict[str, Any]:
    return {
        "island_id": island.pk,
        "name": island.name,
        "region": island.site.region,
        "country": island.site.country,
        "gpu": island.gpu_id,
        "gpu_name": island.gpu.name,
        "gpu_count": island.gpu_count,
        "gpus_per_lot": island.gpus_per_lot,
        "free_gpus": free.gpus,
        "free_until": None if free.until_min is None else minute_start(free.until_min),
        "price_uusd_per_gpu_hour": island.price_uusd_per_gpu_hour,
        "available_from": island.available_from,
        "available_until": island.available_until,
        "min_lease_min": island.min_lease_min,
        "wan_up_mbps": island.wan_up_mbps,
        "wan_down_mbps": island.wan_down_mbps,
        "preemptible": island.preemptible,
        "preempt_notice_s": island.preempt_notice_s,
        "simulated": island.simulated,
        "state": island.state,
        "state_since": island.state_since,
    }


class IslandsOnOffer(generics.GenericAPIView[Island]):
    permission_classes = [AllowAny]
    serializer_class = IslandOnOfferOut
    pagination_class = MarketPagination
    queryset = Island.objects.none()

    @extend_schema(
        operation_id="islands_on_offer_list", parameters=[IslandQuery], responses=IslandOnOfferOut(many=True)
    )
    def get(self, request: Request) -> Response:
        """Our own islands that take leases, cheapest first."""
        query = request.query_params.dict()
        wanted = IslandQuery(data=query).wanted(query)
        now = database_now()
        page = self.paginate_queryset(selectors.islands_on_offer(now, wanted)) or []
        free = selectors.free_now(page, minute_of(now))
        return self.get_paginated_response([island_body(island, free[island.pk]) for island in page])


class LeaseIslandOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField()
    region = serializers.CharField()


class LeaseOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    island = LeaseIslandOut()
    gpu = serializers.CharField(help_text="Canonical id.")
    gpus = serializers.IntegerField()
    purpose = serializers.ChoiceField(choices=LeasePurpose.choices)
    job_id = serializers.CharField(allow_null=True)
    state = serializers.ChoiceField(choices=LeaseState.choices)
    end_reason = serializers.CharField()
    price_uusd_per_gpu_hour = serializers.IntegerField()
    start_at = serializers.DateTimeField()
    end_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    settled_at = serializers.DateTimeField(allow_null=True, help_text="When the rest was given back.")
    created_at = serializers.DateTimeField()
    window_gpu_ms = serializers.IntegerField(help_text="What was bought, in GPU-milliseconds.")
    delivered_gpu_ms = serializers.IntegerField(help_text="What was delivered and is billed.")
    charged_uusd = serializers.IntegerField()
    held_uusd = serializers.IntegerField(help_text="Still held for it.")


def lease_bodies(leases: Iterable[Lease]) -> list[dict[str, Any]]:
    rows = list(leases)
    meters = selectors.meters_of(rows)
    return [_lease_body(lease, meters[lease.pk]) for lease in rows]


def _lease_body(lease: Lease, meter: Meter) -> dict[str, Any]:
    return {
        "id": lease.pk,
        "island": {"id": lease.island_id, "name": lease.island.name, "region": lease.island.site.region},
        "gpu": lease.sku.gpu_id,
        "gpus": lease.gpus,
        "purpose": lease.purpose,
        "job_id": lease.job_ref or None,
        "state": lease.state,
        "end_reason": lease.end_reason,
        "price_uusd_per_gpu_hour": lease.price_uusd_per_gpu_hour,
        "start_at": minute_start(lease.start_min),
        "end_at": minute_start(lease.end_min),
        "ended_at": lease.ended_at,
        "settled_at": lease.settled_at,
        "created_at": lease.created_at,
        "window_gpu_ms": (lease.end_min - lease.start_min) * 60_000 * lease.gpus,
        "delivered_gpu_ms": meter.billable_gpu_ms,
        "charged_uusd": meter.charged_uusd,
        "held_uusd": meter.escrow.balance_uusd,
    }


class LeaseIn(serializers.Serializer[Any]):
    island_id = serializers.CharField(max_length=LENGTH)
    gpus = serializers.IntegerField(min_value=1, max_value=10**6)
    start_at = serializers.DateTimeField(required=False, allow_null=True, help_text="Left out: now.")
    end_at = serializers.DateTimeField()
    max_price_uusd_per_gpu_hour = serializers.IntegerField(
        required=False, allow_null=True, min_value=0, max_value=MONEY_MAX, help_text="Dearer, and nothing is rented."
    )


class ReasonOut(serializers.Serializer[Any]):
    code = serializers.CharField()
    field = serializers.CharField(help_text="Empty where it lies with no field.")
    message = serializers.CharField()


class QuoteOut(serializers.Serializer[Any]):
    island_id = serializers.CharField()
    gpus = serializers.IntegerField()
    start_at = serializers.DateTimeField(allow_null=True, help_text="As snapped to the minute.")
    end_at = serializers.DateTimeField(allow_null=True)
    price_uusd_per_gpu_hour = serializers.IntegerField()
    cost_uusd = serializers.IntegerField(allow_null=True, help_text="The most it can cost; this would be held.")
    fee_bps = serializers.IntegerField()
    fee_note = serializers.CharField()
    free_gpus = serializers.IntegerField(allow_null=True, help_text="Free over the whole window.")
    spendable_uusd = serializers.IntegerField()
    can_be_rented = serializers.BooleanField()
    reasons = ReasonOut(many=True)


def quote_body(quote: services.Quote) -> dict[str, Any]:
    window = quote.window
    return {
        "island_id": quote.island.pk,
        "gpus": quote.gpus,
        "start_at": None if window is None else minute_start(window.start_min),
        "end_at": None if window is None else minute_start(window.end_min),
        "price_uusd_per_gpu_hour": quote.island.price_uusd_per_gpu_hour,
        "cost_uusd": quote.cost_uusd,
        "fee_bps": quote.fee_bps,
        "fee_note": quote.fee_note,
        "free_gpus": quote.free_gpus,
        "spendable_uusd": quote.spendable_uusd,
        "can_be_rented": not quote.reasons,
        "reasons": [{"code": each.code, "field": each.field, "message": each.message} for each in quote.reasons],
    }


class ExtendIn(serializers.Serializer[Any]):
    end_at = serializers.DateTimeField()


class LeasesView(generics.GenericAPIView[Lease]):
    serializer_class = LeaseOut
    pagination_class = MarketPagination
    queryset = Lease.objects.none()

    @extend_schema(operation_id="leases_list", responses=LeaseOut(many=True))
    def get(self, request: Request) -> Response:
        """Your leases, newest first."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        page = self.paginate_queryset(selectors.leases_of(actor.organisation)) or []
        return self.get_paginated_response(lease_bodies(page))

    @extend_schema(operation_id="leases_create", parameters=[KEY], request=LeaseIn, responses={201: LeaseOut})
    def post(self, request: Request) -> Response:
        """Rent GPUs for a window at the asked price. What the whole window can cost is held until it is settled."""
        actor = current_actor(request)
        demand(actor, Action.WORK)
        form = LeaseIn(data=request.data)
        form.is_valid(raise_exception=True)

        def handler() -> Response:
            lease = services.rent(actor.organisation, by=actor.name, now=database_now(), **form.validated_data)
            return Response(_fresh(request, lease.pk), status=status.HTTP_201_CREATED)

        return idempotent(request, "leases.create", request.data, handler)


class LeasePreviewView(APIView):
    @extend_schema(operation_id="leases_preview", request=LeaseIn, responses=QuoteOut)
    def post(self, request: Request) -> Response:
        """What it would cost and whether it could be had, with all reasons. Writes nothing and needs no key."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        form = LeaseIn(data=request.data)
        form.is_valid(raise_exception=True)
        return Response(
            quote_body(services.quote(actor.organisation, services.Wish(**form.validated_data), database_now()))
        )


class LeaseView(APIView):
    @extend_schema(operation_id="leases_get", responses=LeaseOut)
    def get(self, request: Request, lease_id: str) -> Response:
        """One lease: its window, what was delivered, what is charged and what is held."""
        demand(current_actor(request), Action.VIEW)
        return Response(_fresh(request, lease_id))


class LeaseExtendView(APIView):
    @extend_schema(operation_id="leases_extend", parameters=[KEY], request=ExtendIn, responses=LeaseOut)
    def post(self, request: Request, lease_id: str) -> Response:
        """Keep the same GPUs until later, at the lease's price."""
        actor = current_actor(request)
        demand(actor, Action.WORK)
        lease = selectors.reservation_for(actor.organisation, lease_id)
        form = ExtendIn(data=request.data)
        form.is_valid(raise_exception=True)
        end_at: datetime = form.validated_data["end_at"]

        def handler() -> Response:
            services.extend(lease.pk, end_at=end_at, by=actor.name, now=database_now())
            return Response(_fresh(request, lease.pk))

        return idempotent(request, f"leases.extend:{lease.pk}", request.data, handler)


class LeaseEndView(APIView):
    @extend_schema(operation_id="leases_end", parameters=[KEY], request=None, responses=LeaseOut)
    def post(self, request: Request, lease_id: str) -> Response:
        """Give the lease back. What is not used is returned once the agent's last counter is in."""
        actor = current_actor(request)
        demand(actor, Action.WORK)
        lease = selectors.reservation_for(actor.organisation, lease_id)

        def handler() -> Response:
            services.end_lease(lease.pk, reason="released", by=actor.name, now=database_now())
            return Response(_fresh(request, lease.pk))

        return idempotent(request, f"leases.end:{lease.pk}", request.data, handler)


def _fresh(request: Request, lease_id: str) -> dict[str, Any]:
    (body,) = lease_bodies([selectors.lease_for(current_actor(request).organisation, lease_id)])
    return body
