"""Addresses of accounts: pages and API."""

from __future__ import annotations

from django.urls import path

from marketplace.accounts import api, web

app_name = "accounts"
urlpatterns = [
    path("", web.landing, name="landing"),
    path("organisation/", web.organisation, name="organisation"),
    path("organisation/rename", web.rename, name="rename"),
    path("organisation/switch", web.switch, name="switch"),
    path("organisation/keys", web.issue_key, name="issue_key"),
    path("organisation/keys/<str:key_id>/revoke", web.revoke_key, name="revoke_key"),
    path("api/v1/me", api.MeView.as_view(), name="api_me"),
    path("api/v1/api-keys", api.ApiKeysView.as_view(), name="api_keys"),
    path("api/v1/api-keys/<str:key_id>", api.ApiKeyView.as_view(), name="api_key"),
]
