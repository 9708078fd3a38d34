"""The addresses of the fleet: pages, the sellers' API, and the two calls of an agent."""

from __future__ import annotations

from django.urls import path

from marketplace.fleet import agent_api, api, web

app_name = "fleet"
ACTIONS = ("list", "unlist", "rotate", "revoke", "retire")
urlpatterns = [
    path("islands", web.islands, name="islands"),
    path("islands/new", web.new_island, name="new_island"),
    path("islands/<str:island_id>", web.island, name="island"),
    path("islands/<str:island_id>/live", web.live, name="live"),
    path("islands/<str:island_id>/join-token", web.join_token, name="join_token"),
    path("islands/<str:island_id>/terms", web.change_terms, name="change_terms"),
    *(path(f"islands/<str:island_id>/{each}", web.act, {"action": each}, name=each) for each in ACTIONS),
    path("api/agent/v1/enrol", agent_api.enrol, name="agent_enrol"),
    path("api/agent/v1/sync", agent_api.sync, name="agent_sync"),
    path("api/v1/sites", api.SitesView.as_view(), name="api_sites"),
    path("api/v1/islands", api.IslandsView.as_view(), name="api_islands"),
    path("api/v1/islands/<str:island_id>", api.IslandView.as_view(), name="api_island"),
    path("api/v1/islands/<str:island_id>/join-tokens", api.JoinTokensView.as_view(), name="api_join_tokens"),
    path("api/v1/islands/<str:island_id>/agent", api.AgentView.as_view(), name="api_agent"),
    path("api/v1/islands/<str:island_id>/events", api.IslandEventsView.as_view(), name="api_island_events"),
]
