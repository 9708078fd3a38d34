"""Money over REST: top up, the balance, the statement. Every amount is an integer of micro-USD.

Invariant: a top-up asked for twice under one key is one top-up with one payment page, also when the answer was lost.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.http import HttpResponse
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import Action, current_actor, demand
from marketplace.accounts.idempotency import HEADER, REPLAYED, idempotent
from marketplace.billing import gateway, selectors
from marketplace.billing.models import TOP_UP_LEAST_UUSD, TOP_UP_MOST_UUSD, TopUp, TopUpState
from marketplace.billing.periods import period
from marketplace.billing.services import inbox, topups
from marketplace.core.clock import database_now
from marketplace.core.errors import Busy, Problem

KEY_PARAMETER = OpenApiParameter(
    HEADER, str, OpenApiParameter.HEADER, required=True, description="Of your choice; the same for a repeated request."
)


class TopUpIn(serializers.Serializer[Any]):
    amount_uusd = serializers.IntegerField(
        min_value=TOP_UP_LEAST_UUSD, max_value=TOP_UP_MOST_UUSD, help_text="Whole cents: a multiple of 10,000."
    )


class TopUpOut(serializers.ModelSerializer[TopUp]):
    state = serializers.ChoiceField(choices=TopUpState.choices)
    pay_url = serializers.SerializerMethodField(
        help_text="Where a person pays. Null when there is nothing to pay, and while the payment provider does not"
        " answer: ask again for the top-up, the page is opened as soon as it does."
    )
    problem = serializers.CharField(help_text="Why it is not paid, in words; empty where nothing is wrong.")

    class Meta:
        model = TopUp
        fields = ["id", "state", "amount_uusd", "pay_url", "problem", "created_at", "settled_at"]

    def get_pay_url(self, top_up: TopUp) -> str | None:
        return top_up.pay_url if top_up.state == TopUpState.PENDING and top_up.pay_url else None


class BalanceOut(serializers.Serializer[Any]):
    cash_uusd = serializers.IntegerField(help_text="To spend.")
    held_uusd = serializers.IntegerField(help_text="In escrow for jobs and leases; what they do not use comes back.")
    earned_uusd = serializers.IntegerField(help_text="By your islands, still in the dispute window.")
    payable_uusd = serializers.IntegerField(help_text="To you, with the next payout.")
    reserve_uusd = serializers.IntegerField(help_text="Of your first sales, kept for a while, then payable.")


class StatementQuery(serializers.Serializer[Any]):
    since = serializers.DateTimeField(required=False, help_text="Included. By default 30 days before `until`.")
    until = serializers.DateTimeField(required=False, help_text="Not included. By default now.")


class StatementLineOut(serializers.Serializer[Any]):
    day = serializers.DateField(help_text="In UTC.")
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    what = serializers.CharField()
    ref = serializers.CharField(help_text="The lease, job or payment.")
    entries = serializers.IntegerField(help_text="Transfers of the ledger in this line.")
    moved = BalanceOut(help_text="What it did to each balance.")
    fee_uusd = serializers.IntegerField(allow_null=True, help_text="Of what you earned: our fee, already taken off.")


class StatementOut(serializers.Serializer[Any]):
    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    opening = BalanceOut()
    lines = StatementLineOut(many=True)
    closing = BalanceOut(help_text="Opening and lines add up to it.")


class TopUpsView(APIView):
    @extend_schema(
        operation_id="top_ups_create", parameters=[KEY_PARAMETER], request=TopUpIn, responses={201: TopUpOut}
    )
    def post(self, request: Request) -> Response:
        """Begin to pay money in: send a person to `pay_url`, then ask for the top-up until it is `paid`."""
        actor = current_actor(request)
        form = TopUpIn(data=request.data)
        form.is_valid(raise_exception=True)
        now = database_now()

        def start() -> Response:
            top_up = topups.start_top_up(actor, amount_uusd=form.validated_data["amount_uusd"], now=now)
            return Response({"id": top_up.pk}, status=status.HTTP_201_CREATED)

        noted = idempotent(request, "top-ups", form.validated_data, start)
        try:
            top_up = topups.open_payment(noted.data["id"], now)
        except Busy:
            # The wish is noted, and the sweep opens the page: to refuse now would be untrue.
            top_up = selectors.top_up_for(actor.organisation, noted.data["id"])
        headers = {"Location": reverse("billing:api_top_up", args=[top_up.pk])}
        if REPLAYED in noted.headers:
            headers[REPLAYED] = noted.headers[REPLAYED]
        return Response(TopUpOut(top_up).data, status=status.HTTP_201_CREATED, headers=headers)


class TopUpView(APIView):
    @extend_schema(operation_id="top_ups_retrieve", responses=TopUpOut)
    def get(self, request: Request, top_up_id: str) -> Response:
        """How a top-up stands."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        return Response(TopUpOut(selectors.top_up_for(actor.organisation, top_up_id)).data)


class BalanceView(APIView):
    @extend_schema(operation_id="balance", responses=BalanceOut)
    def get(self, request: Request) -> Response:
        """What the organisation has, and is owed."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        return Response(BalanceOut(selectors.balances(actor.organisation)).data)


class StatementView(APIView):
    @extend_schema(operation_id="statement", parameters=[StatementQuery], responses=StatementOut)
    def get(self, request: Request) -> Response:
        """What moved, by day. Opening + lines = closing, for each balance; at most 366 days at once."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        query = StatementQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        since, until = period(*_moments(query), database_now())
        return Response(StatementOut(asdict(selectors.statement(actor.organisation, since, until))).data)


def _moments(query: StatementQuery) -> tuple[datetime | None, datetime | None]:
    asked = query.validated_data
    return asked.get("since"), asked.get("until")


@csrf_exempt  # Authenticated by its signature: whoever sends it has no session of ours.
@require_POST
def stripe_webhook(request: Any) -> HttpResponse:
    """Take a message of the payment provider: verified, stored, answered; acted on afterwards."""
    try:
        message = gateway.read_message(request.body, request.headers.get(gateway.SIGNATURE_HEADER, ""))
    except Problem as problem:
        return HttpResponse(problem.message, status=problem.status, content_type="text/plain")
    inbox.take(message, database_now())
    return HttpResponse(status=200)
