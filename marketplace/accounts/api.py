"""The REST face of accounts: who am I, and my organisation's keys."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts import selectors, services
from marketplace.accounts.access import Action, current_actor, demand
from marketplace.accounts.models import ApiKey, Role, User
from marketplace.core.clock import database_now
from marketplace.core.errors import Forbidden


class OrganisationOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField()


class MeOut(serializers.Serializer[Any]):
    organisation = OrganisationOut()
    role = serializers.ChoiceField(choices=Role.choices)
    actor = serializers.CharField(source="name", help_text="`user:<id>` or `key:<id>`, as the audit trail names you")


class ApiKeyOut(serializers.ModelSerializer[ApiKey]):
    class Meta:
        model = ApiKey
        fields = ["id", "name", "role", "hint", "created_at", "expires_at", "revoked_at", "last_used_at"]


class ApiKeyList(serializers.Serializer[Any]):
    items = ApiKeyOut(many=True)


class ApiKeyIn(serializers.Serializer[Any]):
    name = serializers.CharField(max_length=services.NAME_LENGTH_MAX)
    role = serializers.ChoiceField(choices=Role.choices, default=Role.MEMBER)
    expires_in_days = serializers.IntegerField(
        min_value=1, max_value=services.KEY_DAYS_MAX, default=services.KEY_DAYS_DEFAULT
    )


class IssuedKeyOut(ApiKeyOut):
    secret = serializers.CharField(help_text="Shown this once: we keep only its hash.")

    class Meta(ApiKeyOut.Meta):
        fields = [*ApiKeyOut.Meta.fields, "secret"]


class MeView(APIView):
    @extend_schema(operation_id="me", responses=MeOut)
    def get(self, request: Request) -> Response:
        """The organisation and role this request acts in."""
        return Response(MeOut(current_actor(request)).data)


class ApiKeysView(APIView):
    @extend_schema(operation_id="api_keys_list", responses=ApiKeyList)
    def get(self, request: Request) -> Response:
        """The newest keys, those that no longer work included."""
        actor = current_actor(request)
        demand(actor, Action.MANAGE)
        keys = selectors.keys_of(actor.organisation)[: settings.PAGE_LIMIT]
        return Response({"items": ApiKeyOut(keys, many=True).data})

    @extend_schema(operation_id="api_keys_create", request=ApiKeyIn, responses={201: IssuedKeyOut})
    def post(self, request: Request) -> Response:
        """Issue a key, with a key. Its secret is in this answer and nowhere else, so nothing is stored for a retry."""
        actor = current_actor(request)
        if isinstance(request.user, User):
            # A stolen session must not become a lasting key: the page asks for the password again, this cannot.
            raise Forbidden("a signed-in person issues keys on the organisation's page", code="issue_on_page")
        form = ApiKeyIn(data=request.data)
        form.is_valid(raise_exception=True)
        issued = services.issue_key(actor, now=database_now(), **form.validated_data)
        body = {**ApiKeyOut(issued.key).data, "secret": issued.secret}
        return Response(body, status=status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})


class ApiKeyView(APIView):
    @extend_schema(operation_id="api_keys_revoke", responses={204: None})
    def delete(self, request: Request, key_id: str) -> Response:
        """Revoke a key: the next request with it is refused."""
        services.revoke_key(current_actor(request), key_id, now=database_now())
        return Response(status=status.HTTP_204_NO_CONTENT)
