"""The catalogue over REST: offers and GPU names, readable by everyone.

Invariant: reads only; unknown or malformed filters are refused with the field's name, so no typing error widens a list.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import generics, serializers
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.catalog import index, selectors
from marketplace.catalog.models import FormFactor, GpuModel, Offer, PricingModel, Resale
from marketplace.core.clock import database_now
from marketplace.core.errors import FieldProblem, InvalidInput


class CataloguePagination(LimitOffsetPagination):
    default_limit = 50
    max_limit = settings.PAGE_LIMIT
    known_count: int | None = None

    def get_count(self, queryset: Any) -> int:
        return super().get_count(queryset) if self.known_count is None else self.known_count


class OfferQuery(serializers.Serializer[Any]):
    gpu = serializers.CharField(required=False, help_text="A canonical id (`h100-sxm-80g`) or a family (`H100`).")
    channel = serializers.CharField(required=False, help_text="The slug of a channel.")
    max_price_uusd_per_gpu_hour = serializers.IntegerField(required=False, min_value=0, max_value=10**15)
    min_vram_gib = serializers.IntegerField(required=False, min_value=0, max_value=100_000)
    tier = serializers.CharField(required=False, help_text="The tier as the channel names it.")
    spot = serializers.BooleanField(required=False, help_text="Only spot offers, or only others.")
    sort = serializers.ChoiceField(choices=sorted(selectors.SORTS), default="price")

    def wanted(self, query: dict[str, str]) -> selectors.OfferFilter:
        unknown = sorted(set(query) - set(self.fields) - {"limit", "offset"})
        if unknown:
            raise InvalidInput("some filters are unknown", fields=[FieldProblem(name, "unknown") for name in unknown])
        self.is_valid(raise_exception=True)
        return selectors.OfferFilter(**self.validated_data)


class GpuSerializer(serializers.ModelSerializer[GpuModel]):
    form_factor = serializers.ChoiceField(choices=FormFactor.values)
    offer_count = serializers.IntegerField()
    from_price_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True)

    class Meta:
        model = GpuModel
        fields = [
            "id",
            "name",
            "vendor",
            "family",
            "form_factor",
            "vram_gib",
            "bf16_dense_tflops",
            "offer_count",
            "from_price_uusd_per_gpu_hour",
        ]


class OfferSerializer(serializers.Serializer[Any]):
    """The shape of `offer_body`, for the schema: DRF's own rendering takes ten times as long as the query."""

    offer_uid = serializers.CharField()
    gpu = serializers.CharField(help_text="Canonical id.")
    gpu_name = serializers.CharField()
    gpu_name_raw = serializers.CharField(help_text="As the channel spells it.")
    gpu_flags = serializers.ListField(child=serializers.CharField(), help_text="What had to be assumed to name it.")
    vram_gib = serializers.IntegerField(allow_null=True)
    gpus_per_node = serializers.IntegerField()
    intra_link = serializers.CharField()
    vcpus = serializers.IntegerField(allow_null=True)
    ram_mib = serializers.IntegerField(allow_null=True)
    channel = serializers.CharField()
    channel_name = serializers.CharField()
    upstream = serializers.CharField(help_text="Whose machine it is.")
    price_uusd_per_gpu_hour = serializers.IntegerField(allow_null=True)
    pricing_model = serializers.ChoiceField(choices=PricingModel.choices)
    spot = serializers.BooleanField()
    tier = serializers.CharField()
    region_raw = serializers.CharField()
    data_centre_raw = serializers.CharField()
    country = serializers.CharField()
    stock_lower_bound = serializers.IntegerField(allow_null=True)
    resale_allowed = serializers.ChoiceField(choices=Resale.choices)
    observed_at = serializers.DateTimeField()
    freshness = serializers.CharField(help_text="How old it is, in words, and whether it can be booked.")
    bookable = serializers.BooleanField()
    source_url = serializers.URLField()


def offer_body(offer: Offer, now: datetime) -> dict[str, Any]:
    return {
        "offer_uid": offer.offer_uid,
        "gpu": offer.gpu_id,
        "gpu_name": None if offer.gpu is None else offer.gpu.name,
        "gpu_name_raw": offer.gpu_name_raw,
        "gpu_flags": offer.gpu_flags,
        "vram_gib": offer.vram_gib,
        "gpus_per_node": offer.gpus_per_node,
        "intra_link": offer.intra_link,
        "vcpus": offer.vcpus,
        "ram_mib": offer.ram_mib,
        "channel": offer.channel_id,
        "channel_name": offer.channel.name,
        "upstream": offer.upstream,
        "price_uusd_per_gpu_hour": offer.price_uusd_per_gpu_hour,
        "pricing_model": offer.pricing_model,
        "spot": offer.pricing_model.startswith("spot"),
        "tier": offer.tier,
        "region_raw": offer.region_raw,
        "data_centre_raw": offer.data_centre_raw,
        "country": offer.country,
        "stock_lower_bound": offer.stock_lower_bound,
        "resale_allowed": offer.resale_allowed,
        "observed_at": offer.observed_at,
        "freshness": selectors.freshness(offer, now),
        "bookable": selectors.is_bookable(offer, now),
        "source_url": offer.source_url,
    }


class OfferList(generics.ListAPIView[Offer]):
    """What others list, cheapest first."""

    permission_classes = [AllowAny]
    serializer_class = OfferSerializer
    pagination_class = CataloguePagination
    queryset = Offer.objects.none()

    @extend_schema(operation_id="offers_list", parameters=[OfferQuery])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        query = request.query_params.dict()
        wanted = OfferQuery(data=query).wanted(query)
        pages = CataloguePagination()
        pages.known_count = selectors.count(wanted)
        page = pages.paginate_queryset(selectors.offers(wanted), request, view=self) or []
        now = database_now()
        return pages.get_paginated_response([offer_body(offer, now) for offer in page])


class GpuList(generics.ListAPIView[GpuModel]):
    """The GPUs we have a name for."""

    permission_classes = [AllowAny]
    serializer_class = GpuSerializer
    pagination_class = CataloguePagination
    queryset = selectors.gpus()

    @extend_schema(operation_id="gpus_list")
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().get(request, *args, **kwargs)


class IndexQuery(serializers.Serializer[Any]):
    gpu = serializers.CharField(max_length=40, help_text="A canonical id (`h100-sxm-80g`).")
    days = serializers.IntegerField(min_value=1, max_value=index.DAYS_MAX, default=30)
    spot = serializers.BooleanField(default=False, help_text="Of spot offers instead of those on demand.")


class IndexDayOut(serializers.Serializer[Any]):
    day = serializers.DateField(help_text="In UTC. A day on which nobody is known to have asked is missing.")
    offers = serializers.IntegerField(help_text="The same cards on several channels count once, at their lowest price.")
    p10_uusd_per_gpu_hour = serializers.IntegerField()
    median_uusd_per_gpu_hour = serializers.IntegerField()
    p90_uusd_per_gpu_hour = serializers.IntegerField()


class ListedIndex(APIView):
    permission_classes = [AllowAny]

    @extend_schema(operation_id="listed_indices_list", parameters=[IndexQuery], responses=IndexDayOut(many=True))
    def get(self, request: Request) -> Response:
        """What others asked for a GPU, day by day."""
        query = IndexQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        asked = query.validated_data
        pricing = index.SPOT if asked["spot"] else index.ON_DEMAND
        found = index.listed_index(asked["gpu"], asked["days"], database_now(), pricing)
        return Response([asdict(day) for day in found])
