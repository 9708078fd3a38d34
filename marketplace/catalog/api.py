"""The catalogue over REST: offers and GPU names, readable by everyone.

Invariant: reads only; unknown or malformed filters are refused with the field's name, so no typing error widens a list.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import generics, serializers
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response

from marketplace.catalog import selectors
from marketplace.catalog.models import FormFactor, GpuModel, Offer
from marketplace.core.clock import database_now
from marketplace.core.errors import FieldProblem, InvalidInput


class CataloguePagination(LimitOffsetPagination):
    default_limit = 50
    max_limit = settings.PAGE_LIMIT


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


class OfferSerializer(serializers.ModelSerializer[Offer]):
    gpu = serializers.CharField(source="gpu_id")
    gpu_name = serializers.CharField(source="gpu.name")
    channel = serializers.CharField(source="channel_id")
    channel_name = serializers.CharField(source="channel.name")
    spot = serializers.SerializerMethodField()
    bookable = serializers.SerializerMethodField()
    freshness = serializers.SerializerMethodField()

    class Meta:
        model = Offer
        fields = [
            "offer_uid",
            "gpu",
            "gpu_name",
            "gpu_name_raw",
            "gpu_flags",
            "vram_gib",
            "gpus_per_node",
            "intra_link",
            "vcpus",
            "ram_mib",
            "channel",
            "channel_name",
            "upstream",
            "price_uusd_per_gpu_hour",
            "pricing_model",
            "spot",
            "tier",
            "region_raw",
            "data_centre_raw",
            "country",
            "stock_lower_bound",
            "resale_allowed",
            "observed_at",
            "freshness",
            "bookable",
            "source_url",
        ]

    @property
    def now(self) -> datetime:
        moment: datetime = self.context["now"]
        return moment

    @extend_schema_field(bool)
    def get_spot(self, offer: Offer) -> bool:
        return offer.pricing_model.startswith("spot")

    @extend_schema_field(bool)
    def get_bookable(self, offer: Offer) -> bool:
        return selectors.is_bookable(offer, self.now)

    @extend_schema_field(str)
    def get_freshness(self, offer: Offer) -> str:
        return selectors.freshness(offer, self.now)


class OfferList(generics.ListAPIView[Offer]):
    """What others list, cheapest first."""

    permission_classes = [AllowAny]
    serializer_class = OfferSerializer
    pagination_class = CataloguePagination
    queryset = Offer.objects.none()

    @extend_schema(operation_id="offers_list", parameters=[OfferQuery])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        query = request.query_params.dict()
        found = selectors.offers(OfferQuery(data=query).wanted(query))
        page = self.paginate_queryset(found) or []
        context = {**self.get_serializer_context(), "now": database_now()}
        return self.get_paginated_response(OfferSerializer(page, many=True, context=context).data)


class GpuList(generics.ListAPIView[GpuModel]):
    """The GPUs we have a name for."""

    permission_classes = [AllowAny]
    serializer_class = GpuSerializer
    pagination_class = CataloguePagination
    queryset = selectors.gpus()

    @extend_schema(operation_id="gpus_list")
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().get(request, *args, **kwargs)
