"""The addresses of money: pages, the API, and where the payment provider reports."""

from __future__ import annotations

from django.urls import path

from marketplace.billing import api, desk_web, payouts_api, payouts_web, web

app_name = "billing"
urlpatterns = [
    path("money", web.statement, name="statement"),
    path("money/statement.csv", web.statement_csv, name="statement_csv"),
    path("money/top-ups", web.start_top_up, name="start_top_up"),
    path("money/top-ups/<str:top_up_id>", web.top_up, name="top_up"),
    path("money/payouts", payouts_web.page, name="payouts"),
    path("money/payouts/set-up", payouts_web.set_up, name="set_up_payouts"),
    path("money/payouts/pay-out", payouts_web.pay_out, name="pay_out"),
    path("money/payouts/refund", payouts_web.refund, name="refund"),
    path("desk/ledger", desk_web.ledger, name="desk"),
    path("desk/ledger/audit", desk_web.audit, name="audit"),
    path("desk/ledger/books", desk_web.books, name="books"),
    path("desk/corrections", desk_web.corrections, name="corrections"),
    path("desk/corrections/ask", desk_web.ask, name="ask_correction"),
    path("desk/corrections/<str:correction>/decide", desk_web.decide, name="decide_correction"),
    path("billing/stripe/webhook", api.stripe_webhook, name="stripe_webhook"),
    path("api/v1/top-ups", api.TopUpsView.as_view(), name="api_top_ups"),
    path("api/v1/top-ups/<str:top_up_id>", api.TopUpView.as_view(), name="api_top_up"),
    path("api/v1/payouts", payouts_api.PayoutsView.as_view(), name="api_payouts"),
    path("api/v1/payouts/onboarding", payouts_api.OnboardingView.as_view(), name="api_onboarding"),
    path("api/v1/card-refunds", payouts_api.CardRefundsView.as_view(), name="api_card_refunds"),
    path("api/v1/balance", api.BalanceView.as_view(), name="api_balance"),
    path("api/v1/statement", api.StatementView.as_view(), name="api_statement"),
]
