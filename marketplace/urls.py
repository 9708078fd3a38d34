"""The addresses of the product: pages at the root, the customers' API below /api/v1/, the agents' below
/api/agent/v1/."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path
from drf_spectacular.views import SpectacularAPIView

from marketplace.liveness import health

urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", health, name="health"),
    path("accounts/", include("allauth.account.urls")),
    path("", include("marketplace.accounts.urls")),
    path("", include("marketplace.catalog.urls")),
    path("", include("marketplace.fleet.urls")),
    path("", include("marketplace.billing.urls")),
    path("", include("marketplace.training.agent_urls")),
    path("", include("marketplace.trading.urls")),
    path("", include("marketplace.training.urls")),
    path("api/v1/schema", SpectacularAPIView.as_view(), name="api-schema"),
]

handler404 = "marketplace.core.web.not_found"
handler500 = "marketplace.core.web.failure"
