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
    path("organisation/invitations", web.invite, name="invite"),
    path("organisation/invitations/<str:invitation_id>/withdraw", web.withdraw_invitation, name="withdraw_invitation"),
    path("organisation/members/<int:membership_id>/role", web.change_role, name="change_role"),
    path("organisation/members/<int:membership_id>/remove", web.remove_member, name="remove_member"),
    path("invitations/<str:secret>", web.invitation, name="invitation"),
    path("api/v1/me", api.MeView.as_view(), name="api_me"),
    path("api/v1/api-keys", api.ApiKeysView.as_view(), name="api_keys"),
    path("api/v1/api-keys/<str:key_id>", api.ApiKeyView.as_view(), name="api_key"),
]
