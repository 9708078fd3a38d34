"""The page of a seller's money: what was earned, what is payable, where it is paid to, and what was paid. And cash that
goes back to its card.

Invariant: whatever the page promises to do is done by the services; coming back from the provider's page proves
nothing, so the provider is asked.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from marketplace.accounts.access import Action, Actor, current_actor, demand, may
from marketplace.billing import selectors
from marketplace.billing.models import CardRefundState, PayoutState
from marketplace.billing.services import card_refunds, payouts
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import put_on
from marketplace.core.money import format_usd, parse_usd

SHOWN = 20


class RefundForm(forms.Form):
    amount = forms.CharField(label="Amount, US dollars", max_length=20)

    def clean_amount(self) -> int:
        try:
            return parse_usd(self.cleaned_data["amount"], "amount")
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem


@login_required
@never_cache
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    if request.GET.keys() & {"back", "again"}:
        try:
            payouts.refresh_seller_account(actor.organisation, database_now())
        except Problem as problem:
            messages.warning(request, f"{problem.message[:1].upper()}{problem.message[1:]}.")
    return _page(request, actor)


@login_required
@require_POST
def set_up(request: HttpRequest) -> HttpResponse:
    """To the provider's page, on which a person says who is paid."""
    try:
        url = payouts.open_seller_account(current_actor(request), database_now())
    except Problem as problem:
        messages.error(request, f"{problem.message[:1].upper()}{problem.message[1:]}.")
        return redirect("billing:payouts")
    return HttpResponseRedirect(url, status=303)


@login_required
@require_POST
def pay_out(request: HttpRequest) -> HttpResponse:
    try:
        payout = payouts.request_payout(current_actor(request), database_now())
    except Problem as problem:
        messages.error(request, f"Nothing was paid out: {problem.message}.")
    else:
        if payout.state == PayoutState.PAID:
            messages.success(request, f"Paid out: {format_usd(payout.amount_uusd)}.")
        elif payout.state == PayoutState.FAILED:
            messages.error(request, f"The payment provider refused it: {payout.problem}")
        else:
            messages.success(request, "On its way: the payment provider is asked again until it answers.")
    return redirect("billing:payouts")


@login_required
@require_POST
def refund(request: HttpRequest) -> HttpResponse:
    """Cash back to the cards it came from."""
    actor = current_actor(request)
    demand(actor, Action.PAY)
    form = RefundForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        try:
            rows = card_refunds.refund_cash(actor, form.cleaned_data["amount"], database_now())
        except Problem as problem:
            put_on(form, problem, {"amount_uusd": "amount"})
            status = problem.status
        else:
            refused = next((row.problem for row in rows if row.state == CardRefundState.FAILED), "")
            if refused:
                messages.error(request, f"Not all of it could be returned: {refused}")
            else:
                messages.success(request, "Returned. Banks show it within a few days.")
            return redirect("billing:payouts")
    return _page(request, actor, form=form, status=status)


def _page(request: HttpRequest, actor: Actor, *, form: RefundForm | None = None, status: int = 200) -> HttpResponse:
    now = database_now()
    organisation = actor.organisation
    have = selectors.balances(organisation)
    context: dict[str, Any] = {
        "have": have,
        "account": selectors.seller_account_of(organisation),
        "paid_uusd": selectors.paid_out_uusd(organisation),
        "payouts": selectors.payouts_of(organisation)[:SHOWN],
        "why_not": payouts.why_not(organisation, now),
        "refunds": selectors.card_refunds_of(organisation)[:SHOWN],
        "refundable_uusd": min(have.cash_uusd, card_refunds.refundable_in_all_uusd(organisation)),
        "form": form or RefundForm(),
        "pays": may(actor, Action.PAY),
    }
    return render(request, "billing/payouts.html", context, status=status)
