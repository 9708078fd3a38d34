"""The sellers' face of the fleet over REST: sites, islands, join tokens, agents.

Invariant: another organisation's site or island is 404; a write happens once for one Idempotency-Key, except where its
answer holds a secret, which is never stored for a retry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.urls import reverse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers, status
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import current_actor
from marketplace.accounts.idempotency import HEADER, idempotent
from marketplace.core.clock import database_now
from marketplace.core.errors import FieldProblem, InvalidInput
from marketplace.fleet import selectors, services
from marketplace.fleet.models import Agent, FleetEvent, Island, IslandState, Site

KEY = OpenApiParameter(HEADER, str, OpenApiParameter.HEADER, required=True, description="The same key: the same row.")


class FleetPages(LimitOffsetPagination):
    default_limit = 50
    max_limit = settings.PAGE_LIMIT


class SiteIn(serializers.Serializer[Any]):
    name = serializers.CharField(max_length=120)
    country = serializers.CharField(max_length=2, required=False, default="", allow_blank=True, help_text="ISO 3166-1.")
    region = serializers.CharField(max_length=80, required=False, default="", allow_blank=True)


class SiteOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField()
    country = serializers.CharField(help_text="Two letters; empty is not stated.")
    region = serializers.CharField(help_text="Empty is not stated.")
    created_at = serializers.DateTimeField()


class TermsIn(serializers.Serializer[Any]):
    """What an owner may change at any time; what is rented already keeps its price."""

    price_uusd_per_gpu_hour = serializers.IntegerField(min_value=1, help_text="A multiple of 60.")
    available_from = serializers.DateTimeField()
    available_until = serializers.DateTimeField(allow_null=True, help_text="Null: no end stated.")
    min_lease_min = serializers.IntegerField(min_value=1)
    wan_up_mbps = serializers.IntegerField(min_value=1, allow_null=True, help_text="Null: not stated.")
    wan_down_mbps = serializers.IntegerField(min_value=1, allow_null=True)
    preemptible = serializers.BooleanField()
    preempt_notice_s = serializers.IntegerField(min_value=0, allow_null=True)


class IslandIn(TermsIn):
    site_id = serializers.CharField()
    name = serializers.CharField(max_length=120)
    gpu = serializers.CharField(help_text="Canonical id, as `/api/v1/gpus` lists them.")
    gpu_count = serializers.IntegerField(min_value=1)
    gpus_per_lot = serializers.IntegerField(min_value=1, default=1, help_text="Rented together: 8 for whole nodes.")
    available_from = serializers.DateTimeField(required=False, help_text="By default now.")
    available_until = serializers.DateTimeField(allow_null=True, required=False, default=None)
    min_lease_min = serializers.IntegerField(min_value=1, default=1)
    wan_up_mbps = serializers.IntegerField(min_value=1, allow_null=True, required=False, default=None)
    wan_down_mbps = serializers.IntegerField(min_value=1, allow_null=True, required=False, default=None)
    preemptible = serializers.BooleanField(default=False)
    preempt_notice_s = serializers.IntegerField(min_value=0, allow_null=True, required=False, default=None)
    simulated = serializers.BooleanField(default=False, help_text="GPUs posed by CPU slots, for rehearsals.")


class IslandChange(TermsIn):
    listed = serializers.BooleanField(help_text="False: it takes no new leases.")


class AgentOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    epoch = serializers.IntegerField()
    version = serializers.CharField()
    enrolled_at = serializers.DateTimeField()
    last_seen_at = serializers.DateTimeField(allow_null=True)
    draining = serializers.BooleanField()
    misfit = serializers.CharField(help_text="Why what it reports is not what was registered; empty when it is.")


class IslandOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    site_id = serializers.CharField()
    name = serializers.CharField()
    gpu = serializers.CharField()
    gpu_count = serializers.IntegerField()
    gpus_per_lot = serializers.IntegerField()
    price_uusd_per_gpu_hour = serializers.IntegerField()
    available_from = serializers.DateTimeField()
    available_until = serializers.DateTimeField(allow_null=True)
    min_lease_min = serializers.IntegerField()
    wan_up_mbps = serializers.IntegerField(allow_null=True)
    wan_down_mbps = serializers.IntegerField(allow_null=True)
    preemptible = serializers.BooleanField()
    preempt_notice_s = serializers.IntegerField(allow_null=True)
    simulated = serializers.BooleanField()
    listed = serializers.BooleanField()
    state = serializers.ChoiceField(choices=IslandState.choices)
    state_since = serializers.DateTimeField()
    agent = AgentOut(allow_null=True, help_text="Null: none has enrolled, or it was revoked.")
    created_at = serializers.DateTimeField()


class JoinTokenOut(serializers.Serializer[Any]):
    token = serializers.CharField(help_text="Shown this once; works once.")
    expires_at = serializers.DateTimeField()
    commands = serializers.ListField(child=serializers.CharField(), help_text="To type on the cluster, in this order.")


class FleetEventOut(serializers.Serializer[Any]):
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    message = serializers.CharField()
    detail = serializers.DictField()


_PLAIN = tuple(str(name) for name in IslandOut().fields if str(name) not in ("gpu", "agent"))


def site_body(site: Site) -> dict[str, Any]:
    return {name: getattr(site, name) for name in ("id", "name", "country", "region", "created_at")}


def agent_body(agent: Agent | None) -> dict[str, Any] | None:
    if agent is None:
        return None
    return {
        name: getattr(agent, name)
        for name in ("id", "epoch", "version", "enrolled_at", "last_seen_at", "draining", "misfit")
    }


def island_body(island: Island, agent: Agent | None) -> dict[str, Any]:
    body = {name: getattr(island, name) for name in _PLAIN}
    return {**body, "gpu": island.gpu_id, "agent": agent_body(agent)}


def known_fields(form: serializers.Serializer[Any], data: Any) -> None:
    """A misspelt field must not be dropped in silence."""
    unknown = sorted(set(data) - set(form.fields)) if isinstance(data, Mapping) else []
    if unknown:
        problems = [FieldProblem(str(name), "there is no such field") for name in unknown]
        raise InvalidInput("some fields are not right", fields=problems)
    form.is_valid(raise_exception=True)


class SitesView(generics.GenericAPIView[Site]):
    serializer_class = SiteOut
    pagination_class = FleetPages
    queryset = Site.objects.none()

    @extend_schema(operation_id="sites_list", responses=SiteOut(many=True))
    def get(self, request: Request) -> Response:
        """The organisation's sites."""
        page: Sequence[Site] = self.paginate_queryset(selectors.sites_of(current_actor(request).organisation)) or []
        return self.get_paginated_response([site_body(site) for site in page])

    @extend_schema(operation_id="sites_create", parameters=[KEY], request=SiteIn, responses={201: SiteOut})
    def post(self, request: Request) -> Response:
        """Register a place with a network of its own."""
        actor = current_actor(request)
        form = SiteIn(data=request.data)
        known_fields(form, request.data)

        def create() -> Response:
            site = services.register_site(actor, now=database_now(), **form.validated_data)
            return Response(site_body(site), status=status.HTTP_201_CREATED)

        return idempotent(request, "sites", request.data, create)


class IslandsView(generics.GenericAPIView[Island]):
    serializer_class = IslandOut
    pagination_class = FleetPages
    queryset = Island.objects.none()

    @extend_schema(operation_id="islands_list", responses=IslandOut(many=True))
    def get(self, request: Request) -> Response:
        """The organisation's own islands, newest first."""
        found = selectors.islands_of(current_actor(request).organisation)
        page: Sequence[Island] = self.paginate_queryset(found) or []
        agents = selectors.current_agents(page)
        return self.get_paginated_response([island_body(island, agents.get(island.pk)) for island in page])

    @extend_schema(operation_id="islands_create", parameters=[KEY], request=IslandIn, responses={201: IslandOut})
    def post(self, request: Request) -> Response:
        """Register GPUs to let. They can be rented once an agent has enrolled for them."""
        actor = current_actor(request)
        form = IslandIn(data=request.data)
        known_fields(form, request.data)

        def create() -> Response:
            now = database_now()
            island = services.register_island(actor, now=now, **{"available_from": now, **form.validated_data})
            headers = {"Location": reverse("fleet:api_island", args=[island.pk])}
            return Response(island_body(island, None), status=status.HTTP_201_CREATED, headers=headers)

        return idempotent(request, "islands", request.data, create)


class IslandView(APIView):
    @extend_schema(operation_id="islands_retrieve", responses=IslandOut)
    def get(self, request: Request, island_id: str) -> Response:
        """One island, and who speaks for it."""
        island = selectors.island_for(current_actor(request).organisation, island_id)
        return Response(island_body(island, selectors.current_agent(island)))

    @extend_schema(operation_id="islands_change", request=IslandChange(partial=True), responses=IslandOut)
    def patch(self, request: Request, island_id: str) -> Response:
        """Change its terms. The same change again changes nothing, so it needs no key."""
        form = IslandChange(data=request.data, partial=True)
        known_fields(form, request.data)
        island = services.change_island(current_actor(request), island_id, now=database_now(), **form.validated_data)
        return Response(island_body(island, selectors.current_agent(island)))

    @extend_schema(operation_id="islands_retire", responses=IslandOut)
    def delete(self, request: Request, island_id: str) -> Response:
        """Retire it for good. Refused while somebody holds GPUs of it."""
        island = services.retire_island(current_actor(request), island_id, now=database_now())
        return Response(island_body(island, selectors.current_agent(island)))


class JoinTokensView(APIView):
    @extend_schema(operation_id="islands_join_token", request=None, responses={201: JoinTokenOut})
    def post(self, request: Request, island_id: str) -> Response:
        """A token for one agent, within the hour. It is in this answer and nowhere else."""
        issued = services.issue_join_token(current_actor(request), island_id, database_now())
        body = {
            "token": issued.secret,
            "expires_at": issued.token.expires_at,
            "commands": enrol_commands(request.build_absolute_uri("/").rstrip("/"), issued.secret),
        }
        return Response(body, status=status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})


class AgentView(APIView):
    @extend_schema(operation_id="islands_revoke_agent", responses={204: None})
    def delete(self, request: Request, island_id: str) -> Response:
        """Revoke the island's agent: its next call is refused, and it stops what it runs."""
        services.revoke_agent(current_actor(request), island_id, why="revoked over the API", now=database_now())
        return Response(status=status.HTTP_204_NO_CONTENT)


class IslandEventsView(generics.GenericAPIView[FleetEvent]):
    serializer_class = FleetEventOut
    pagination_class = FleetPages
    queryset = FleetEvent.objects.none()

    @extend_schema(operation_id="islands_events", responses=FleetEventOut(many=True))
    def get(self, request: Request, island_id: str) -> Response:
        """What happened to the island, newest first."""
        island = selectors.island_for(current_actor(request).organisation, island_id)
        page: Sequence[FleetEvent] = self.paginate_queryset(selectors.events_of(island)) or []
        names = ("at", "kind", "message", "detail")
        return self.get_paginated_response([{name: getattr(event, name) for name in names} for event in page])


def enrol_commands(server_url: str, secret: str) -> list[str]:
    return [
        "pip install 'archipelago-agent[trainer]'",
        f"archipelago-agent enroll --server {server_url} --token {secret}",
        "archipelago-agent run",
    ]
