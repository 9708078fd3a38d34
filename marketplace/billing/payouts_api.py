"""Money out over REST: a seller's account, payouts, and cash back to its cards.

Invariant: whatever moves money carries an Idempotency-Key and happens once, also when the provider's answer was lost.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from marketplace.accounts.access import Action, current_actor, demand
from marketplace.accounts.idempotency import idempotent
from marketplace.billing import selectors
from marketplace.billing.api import KEY_PARAMETER
from marketplace.billing.models import CardRefund, CardRefundState, Payout, PayoutState
from marketplace.billing.services import card_refunds, payouts
from marketplace.core.clock import database_now
from marketplace.core.money import MAX_AMOUNT_UUSD

NEWEST = 100


class PayoutOut(serializers.ModelSerializer[Payout]):
    state = serializers.ChoiceField(choices=PayoutState.choices)

    class Meta:
        model = Payout
        fields = ["id", "state", "amount_uusd", "reversed_uusd", "problem", "created_at", "settled_at"]


class SellerAccountOut(serializers.Serializer[Any]):
    payouts_enabled = serializers.BooleanField()
    details_submitted = serializers.BooleanField()
    needs = serializers.ListField(child=serializers.CharField(), help_text="What the provider still asks for.")


class PayoutsOut(serializers.Serializer[Any]):
    account = SellerAccountOut(allow_null=True, help_text="Null: payouts were never set up.")
    why_not = serializers.CharField(help_text="Why nothing can be paid out now; empty where it can.")
    payouts = PayoutOut(many=True, help_text="The newest hundred.")


class OnboardingOut(serializers.Serializer[Any]):
    url = serializers.URLField(help_text="Send a person there. It is good once, and for a few minutes.")


class CardRefundIn(serializers.Serializer[Any]):
    amount_uusd = serializers.IntegerField(
        min_value=10_000, max_value=MAX_AMOUNT_UUSD, help_text="Whole cents: a multiple of 10,000."
    )


class CardRefundOut(serializers.ModelSerializer[CardRefund]):
    state = serializers.ChoiceField(choices=CardRefundState.choices)
    top_up = serializers.CharField(source="top_up_id", help_text="The payment it goes back to.")

    class Meta:
        model = CardRefund
        fields = ["id", "state", "amount_uusd", "top_up", "problem", "created_at", "settled_at"]


class PayoutsView(APIView):
    @extend_schema(operation_id="payouts_list", responses=PayoutsOut)
    def get(self, request: Request) -> Response:
        """Where the organisation is paid, and what it was paid."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        body = {
            "account": selectors.seller_account_of(actor.organisation),
            "why_not": payouts.why_not(actor.organisation, database_now()),
            "payouts": selectors.payouts_of(actor.organisation)[:NEWEST],
        }
        return Response(PayoutsOut(body).data)

    @extend_schema(operation_id="payouts_create", parameters=[KEY_PARAMETER], request=None, responses={201: PayoutOut})
    def post(self, request: Request) -> Response:
        """Pay out all that is payable, in whole cents. It is `created` until the provider has answered."""
        actor = current_actor(request)

        def start() -> Response:
            demand(actor, Action.PAY)
            payout = payouts.start_payout(actor.organisation, by=actor.name, now=database_now())
            return Response({"id": payout.pk}, status=status.HTTP_201_CREATED)

        noted = idempotent(request, "payouts", {}, start)
        payout = payouts.send_or_leave(noted.data["id"], database_now())
        return Response(PayoutOut(payout).data, status=status.HTTP_201_CREATED)


class OnboardingView(APIView):
    @extend_schema(operation_id="payouts_onboarding", request=None, responses=OnboardingOut)
    def post(self, request: Request) -> Response:
        """The page on which a person tells the payment provider who is paid, and where to."""
        return Response({"url": payouts.open_seller_account(current_actor(request), database_now())})


class CardRefundsView(APIView):
    @extend_schema(operation_id="card_refunds_list", responses=CardRefundOut(many=True))
    def get(self, request: Request) -> Response:
        """Cash that went back to its cards, the newest hundred."""
        actor = current_actor(request)
        demand(actor, Action.VIEW)
        return Response(CardRefundOut(selectors.card_refunds_of(actor.organisation)[:NEWEST], many=True).data)

    @extend_schema(
        operation_id="card_refunds_create",
        parameters=[KEY_PARAMETER],
        request=CardRefundIn,
        responses={201: CardRefundOut(many=True)},
    )
    def post(self, request: Request) -> Response:
        """Give cash back to the cards it came from, the newest payment first: one refund for each that is needed."""
        actor = current_actor(request)
        form = CardRefundIn(data=request.data)
        form.is_valid(raise_exception=True)

        def start() -> Response:
            rows = card_refunds.start_refunds(actor, form.validated_data["amount_uusd"], database_now())
            return Response({"ids": [row.pk for row in rows]}, status=status.HTTP_201_CREATED)

        noted = idempotent(request, "card-refunds", form.validated_data, start)
        rows = card_refunds.send_or_leave(noted.data["ids"], database_now())
        return Response(CardRefundOut(rows, many=True).data, status=status.HTTP_201_CREATED)
