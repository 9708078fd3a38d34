"""The addresses of trading: renting, leases, and their API."""

from __future__ import annotations

from django.urls import path

from marketplace.trading import api, market_api, market_web, order_api, order_web, sale_web, web

app_name = "trading"

urlpatterns = [
    path("market/<str:gpu_id>", market_web.class_market, name="class_market"),
    path("islands/<str:island_id>/rent", web.rent, name="rent"),
    path("orders", order_web.orders, name="orders"),
    path("orders/new", order_web.new_order, name="new_order"),
    path("orders/preview", order_web.preview, name="order_preview"),
    path("orders/<str:order_id>", order_web.order, name="order"),
    path("orders/<str:order_id>/cancel", order_web.cancel, name="cancel_order"),
    path("orders/<str:order_id>/amend", order_web.amend, name="amend_order"),
    path("leases", web.leases, name="leases"),
    path("leases/<str:lease_id>", web.lease, name="lease"),
    path("leases/<str:lease_id>/extend", web.extend, name="extend"),
    path("leases/<str:lease_id>/end", web.end, name="end"),
    path("leases/<str:lease_id>/sell", sale_web.sell, name="sell"),
    path("leases/<str:lease_id>/sell/preview", sale_web.preview, name="sale_preview"),
    path("api/v1/islands-on-offer", api.IslandsOnOffer.as_view(), name="api_islands_on_offer"),
    path("api/v1/market", market_api.ClassesView.as_view(), name="api_market"),
    path("api/v1/market/<str:gpu>/depth", market_api.DepthView.as_view(), name="api_depth"),
    path("api/v1/market/<str:gpu>/supply", market_api.SupplyView.as_view(), name="api_supply"),
    path("api/v1/fills", market_api.FillsView.as_view(), name="api_fills"),
    path("api/v1/indices", market_api.DaysView.as_view(), name="api_indices"),
    path("api/v1/positions", market_api.PositionsView.as_view(), name="api_positions"),
    path("api/v1/orders", order_api.OrdersView.as_view(), name="api_orders"),
    path("api/v1/orders/preview", order_api.OrderPreviewView.as_view(), name="api_order_preview"),
    path("api/v1/orders/<str:order_id>", order_api.OrderView.as_view(), name="api_order"),
    path("api/v1/orders/<str:order_id>/amend", order_api.OrderAmendView.as_view(), name="api_order_amend"),
    path("api/v1/orders/<str:order_id>/cancel", order_api.OrderCancelView.as_view(), name="api_order_cancel"),
    path("api/v1/leases", api.LeasesView.as_view(), name="api_leases"),
    path("api/v1/leases/preview", api.LeasePreviewView.as_view(), name="api_lease_preview"),
    path("api/v1/leases/<str:lease_id>", api.LeaseView.as_view(), name="api_lease"),
    path("api/v1/leases/<str:lease_id>/extend", api.LeaseExtendView.as_view(), name="api_lease_extend"),
    path("api/v1/leases/<str:lease_id>/end", api.LeaseEndView.as_view(), name="api_lease_end"),
]
