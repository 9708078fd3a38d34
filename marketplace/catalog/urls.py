"""The addresses of the catalogue."""

from __future__ import annotations

from django.urls import path

from marketplace.catalog.api import GpuList, OfferList

urlpatterns = [
    path("api/v1/offers", OfferList.as_view(), name="api-offers"),
    path("api/v1/gpus", GpuList.as_view(), name="api-gpus"),
]
