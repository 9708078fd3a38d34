"""The addresses of the fleet: pages, the sellers' API, and the two calls of an agent."""

from __future__ import annotations

from django.urls import path

from marketplace.fleet import agent_api

app_name = "fleet"
urlpatterns = [
    path("api/agent/v1/enrol", agent_api.enrol, name="agent_enrol"),
    path("api/agent/v1/sync", agent_api.sync, name="agent_sync"),
]
