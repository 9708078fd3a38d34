"""The calls of agents: enrol and sync. They bear their own secrets; no session and no API key opens them."""

from __future__ import annotations

from django.http import HttpRequest

from marketplace.core.clock import database_now
from marketplace.fleet import services
from marketplace.fleet.wire import agent_view, bearer, demand_protocol
from worker_agent.protocol import EnrolReply, EnrolRequest, SyncReply, SyncRequest


@agent_view(EnrolRequest)
def enrol(request: HttpRequest, message: EnrolRequest) -> EnrolReply:
    demand_protocol(message.protocol)
    return services.enrol(message, database_now())


@agent_view(SyncRequest)
def sync(request: HttpRequest, message: SyncRequest) -> SyncReply:
    demand_protocol(message.protocol)
    return services.sync(bearer(request), message, database_now())
