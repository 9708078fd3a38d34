"""The addresses of money: pages, the API, and where the payment provider reports."""

from __future__ import annotations

from django.urls import path

from marketplace.billing import api, web

app_name = "billing"
urlpatterns = [
    path("money", web.statement, name="statement"),
    path("money/statement.csv", web.statement_csv, name="statement_csv"),
    path("money/top-ups", web.start_top_up, name="start_top_up"),
    path("money/top-ups/<str:top_up_id>", web.top_up, name="top_up"),
    path("billing/stripe/webhook", api.stripe_webhook, name="stripe_webhook"),
    path("api/v1/top-ups", api.TopUpsView.as_view(), name="api_top_ups"),
    path("api/v1/top-ups/<str:top_up_id>", api.TopUpView.as_view(), name="api_top_up"),
    path("api/v1/balance", api.BalanceView.as_view(), name="api_balance"),
    path("api/v1/statement", api.StatementView.as_view(), name="api_statement"),
]
