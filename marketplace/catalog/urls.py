"""The addresses of the catalogue."""

from __future__ import annotations

from django.urls import path

from marketplace.catalog.api import GpuList, ListedIndex, OfferList
from marketplace.catalog.desk_web import quarantine
from marketplace.catalog.web import market

app_name = "catalog"

urlpatterns = [
    path("market", market, name="market"),
    path("desk/quarantine", quarantine, name="quarantine"),
    path("api/v1/offers", OfferList.as_view(), name="api-offers"),
    path("api/v1/indices/listed", ListedIndex.as_view(), name="api-listed-index"),
    path("api/v1/gpus", GpuList.as_view(), name="api-gpus"),
]
