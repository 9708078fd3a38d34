"""The operators' pages of the money: is anything wrong, what waits, and corrections that two of them make.

Invariant: to whoever is no operator they are not there; opening one writes nothing and asks the provider nothing.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_POST, require_safe

from marketplace.accounts.models import User
from marketplace.accounts.operators import operator_name, operators_only
from marketplace.billing import desk
from marketplace.billing.invariants import ALARMS, CHECKS
from marketplace.billing.models import Correction, CorrectionState, LedgerCheck, Transfer, correction_id
from marketplace.billing.services.audits import run_audit
from marketplace.billing.services.books import Books, compare_books
from marketplace.billing.services.corrections import approve_correction, ask_correction, left_uusd, refuse_correction
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import put_on
from marketplace.core.money import format_usd, parse_usd
from marketplace.core.tickets import FIELD, Tickets

RUNS_SHOWN = 12
CORRECTIONS_SHOWN = 50
# A person waits for it; the run that happens by itself has longer.
PATIENCE_MS = 20_000

_tickets = Tickets("billing.correction")


class CorrectionForm(forms.Form):
    transfer = forms.UUIDField(widget=forms.HiddenInput)
    amount = forms.CharField(label="Amount to move back, US dollars", max_length=24)
    reason = forms.CharField(label="Why", max_length=300)

    def clean_amount(self) -> int:
        try:
            return parse_usd(self.cleaned_data["amount"], "amount")
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem


@operators_only
@require_safe
def ledger(request: HttpRequest) -> HttpResponse:
    return _ledger(request)


@operators_only
@require_POST
def audit(request: HttpRequest) -> HttpResponse:
    run_audit(database_now(), operator_name(request), PATIENCE_MS)
    return redirect("billing:desk")


@operators_only
@require_POST
def books(request: HttpRequest) -> HttpResponse:
    """I10, asked of the provider now."""
    try:
        found = compare_books()
    except Problem as problem:
        messages.error(request, f"The books were not compared: {problem.message}")
        return redirect("billing:desk")
    return _ledger(request, found)


@operators_only
@require_safe
def corrections(request: HttpRequest) -> HttpResponse:
    return _corrections(request)


@operators_only
@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    form = CorrectionForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        asked = form.cleaned_data
        try:
            row = ask_correction(
                asked["transfer"],
                asked["amount"],
                reason=asked["reason"],
                by=operator_name(request),
                now=database_now(),
                key=_tickets.read(request.POST.get(FIELD, "")),
            )
        except Problem as problem:
            put_on(form, problem, {"amount_uusd": "amount"})
            status = problem.status
        else:
            messages.success(request, f"Asked for: {format_usd(row.amount_uusd, 6)}. Another operator decides it.")
            return redirect("billing:corrections")
    return _corrections(request, form, status)


@operators_only
@require_POST
def decide(request: HttpRequest, correction: str) -> HttpResponse:
    decided = approve_correction if request.POST.get("decision") == "approve" else refuse_correction
    try:
        row = decided(correction, by=operator_name(request), now=database_now())
    except Problem as problem:
        messages.error(request, f"Nothing was moved: {problem.message}.")
    else:
        done = row.state == CorrectionState.POSTED
        messages.success(
            request, f"Moved back: {format_usd(row.amount_uusd, 6)}." if done else "Refused. Nothing moved."
        )
    return redirect("billing:corrections")


def _ledger(request: HttpRequest, compared: Books | None = None) -> HttpResponse:
    now = database_now()
    runs = list(LedgerCheck.objects.order_by("-ran_at", "-pk")[:RUNS_SHOWN])
    last = runs[0] if runs else None
    who = _who(run.by for run in runs)
    totals = desk.totals()
    have, owe = desk.sum_of(desk.WE_HAVE, totals), desk.sum_of(desk.WE_OWE, totals)
    waits = [(each, each.late(now)) for each in desk.waiting(now)]
    context = {
        "last": last,
        "checks": _checks(last.broken if last else None, CHECKS),
        "alarms": _checks(last.alarms if last else None, ALARMS),
        "runs": [{"run": run, "by": who.get(run.by, "by itself")} for run in runs],
        "waits": waits,
        "late": sum(late for _, late in waits),
        "totals": totals,
        "have_uusd": have,
        "owe_uusd": owe,
        "over_uusd": have - owe,
        "books": compared,
    }
    return render(request, "billing/desk.html", context)


def _checks(found: list[dict[str, Any]] | None, all_of: dict[str, str]) -> list[dict[str, Any]]:
    """Each check with what the last run found of it; None where there was no run."""
    if found is None:
        return [{"name": name, "found": None} for name in all_of]
    by_name = {each["invariant"]: each for each in found}
    return [{"name": name, "found": by_name.get(name, {"count": 0, "subjects": []})} for name in all_of]


def _corrections(request: HttpRequest, form: CorrectionForm | None = None, status: int = 200) -> HttpResponse:
    ref = request.GET.get("ref", "").strip()
    chosen = _chosen(str(form.data.get("transfer", "")) if form else request.GET.get("transfer", ""))
    left = left_uusd(chosen) if chosen else 0
    if chosen is not None and form is None:
        form = CorrectionForm(initial={"transfer": chosen.pk, "amount": format_usd(left, 6)})
    rows = list(desk.corrections()[:CORRECTIONS_SHOWN])
    who = _who(name for row in rows for name in (row.asked_by, row.decided_by))
    me = operator_name(request)
    context = {
        "ref": ref,
        "found": list(desk.transfers_of(ref)) if ref else [],
        "chosen": chosen,
        "left_uusd": left,
        "form": form,
        "ticket": _tickets.issue(correction_id()),
        "waiting": [_shown(row, who, me) for row in rows if row.state == CorrectionState.ASKED],
        "decided": [_shown(row, who, me) for row in rows if row.state != CorrectionState.ASKED],
        "back": f"{reverse('billing:corrections')}?{urlencode({'ref': ref or (chosen.ref if chosen else '')})}",
    }
    return render(request, "billing/corrections.html", context, status=status)


def _chosen(transfer_id: str) -> Transfer | None:
    try:
        found = desk.transfers_of(transfer_id) if transfer_id else ()
        return next((row for row in found if str(row.pk) == transfer_id), None)
    except ValueError:
        return None


def _shown(row: Correction, who: dict[str, str], me: str) -> dict[str, Any]:
    return {
        "row": row,
        "asked_by": who.get(row.asked_by, row.asked_by),
        "decided_by": who.get(row.decided_by, row.decided_by),
        "mine": row.asked_by == me,
    }


def _who(names: Any) -> dict[str, str]:
    """The addresses of operators, by the names that the audit trail has of them."""
    keys = {name: int(name.removeprefix("operator:")) for name in set(names) if name.startswith("operator:")}
    emails = dict(User.objects.filter(pk__in=keys.values()).values_list("pk", "email"))
    return {name: emails[key] for name, key in keys.items() if key in emails}
