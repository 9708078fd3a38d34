"""The pages of money: what an organisation has and is owed, what moved it by day, and paying in.

Invariant: what is shown adds up with the digits that are shown. A payment's state on the page is the row's: coming back
from the payment page proves nothing, so the page waits and says so.
"""

from __future__ import annotations

import csv
from datetime import UTC, timedelta
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import NoReverseMatch, reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from marketplace.accounts.access import Action, Actor, current_actor, may
from marketplace.billing import selectors
from marketplace.billing.models import TOP_UP_LEAST_UUSD, TOP_UP_MOST_UUSD, TopUpState
from marketplace.billing.periods import period_of_days
from marketplace.billing.services import topups
from marketplace.core.clock import database_now
from marketplace.core.errors import Busy, Problem
from marketplace.core.money import UUSD_PER_CENT, format_usd, parse_usd

CENTS, EXACT = 2, 6  # digits behind the point
TOP_UPS_SHOWN = 5
# (balance, its name, what it is)
BALANCES = (
    ("cash_uusd", "Cash", "to spend"),
    ("held_uusd", "Held", "for jobs and leases; the rest comes back"),
    ("earned_uusd", "Earned", "in the dispute window"),
    ("payable_uusd", "Payable", "with the next payout"),
    ("reserve_uusd", "In reserve", "of your first sales, for a while"),
)
# What a reference's prefix says, and the page that shows it.
PAGE_OF = {
    "lse": ("Lease", "trading:lease"),
    "ord": ("Order", "trading:order"),
    "job": ("Job", "training:job"),
    "pi": ("Card payment", None),
    "pyt": ("Payout", None),
    "rfd": ("Card refund", None),
    "du": ("Dispute", None),
}


class PeriodForm(forms.Form):
    since = forms.DateField(required=False, label="From")
    until = forms.DateField(required=False, label="Through")

    def wanted(self) -> selectors.Period:
        days = self.cleaned_data if self.is_valid() else {}
        return period_of_days(days.get("since"), days.get("until"), database_now())


@login_required
@never_cache
@require_safe
def statement(request: HttpRequest) -> HttpResponse:
    return _statement_page(request, current_actor(request))


@login_required
@never_cache
@require_safe
def statement_csv(request: HttpRequest) -> HttpResponse:
    """The same lines for a spreadsheet, exact to the micro-dollar."""
    actor = current_actor(request)
    found = selectors.statement(actor.organisation, *PeriodForm(request.GET).wanted())
    answer = HttpResponse(content_type="text/csv; charset=utf-8")
    last_day = (found.until - timedelta(microseconds=1)).date()
    name = f"archipelago-{found.since:%Y-%m-%d}-{last_day:%Y-%m-%d}.csv"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    out = csv.writer(answer)
    names = [name for name, _, _ in BALANCES]
    out.writerow(["day_utc", "what", "reference", "transfers", *(name.replace("_uusd", "_usd") for name in names)])
    for what, at, row in (("Opening", found.since, found.opening), ("Closing", found.until, found.closing)):
        if what == "Closing":
            for line in found.lines:
                moved = [_plain(amount) for _, amount in line.moved.items()]
                out.writerow([line.day.isoformat(), line.what, line.ref, line.entries, *moved])
        out.writerow([at.isoformat(timespec="seconds"), what, "", "", *(_plain(amount) for _, amount in row.items())])
    return answer


@login_required
@require_POST
def start_top_up(request: HttpRequest) -> HttpResponse:
    """Note the wish and go to the payment page; while the provider does not answer, to ours, which waits for it."""
    actor = current_actor(request)
    typed = request.POST.get("amount", "")
    now = database_now()
    try:
        wanted = parse_usd(typed, "amount")
        top_up = topups.start_top_up(actor, amount_uusd=wanted, now=now, field="amount")
    except Problem as problem:
        return _statement_page(request, actor, status=problem.status, form={"amount": typed, "error": problem.message})
    try:
        top_up = topups.open_payment(top_up.pk, now)
    except Busy:
        return redirect("billing:top_up", top_up.pk)
    return HttpResponseRedirect(top_up.pay_url, status=303)


@login_required
@never_cache
@require_safe
def top_up(request: HttpRequest, top_up_id: str) -> HttpResponse:
    """Where the payment page sends people back to. It asks for itself until the row says how it ended."""
    found = selectors.top_up_for(current_actor(request).organisation, top_up_id)
    context: dict[str, Any] = {
        "top_up": found,
        "back": request.GET.get("back", ""),
        "open": found.state in topups.OPEN,
        "cash_uusd": selectors.balances(found.organisation).cash_uusd if found.state == TopUpState.PAID else None,
    }
    # The page's own question wants the part that may have changed, and nothing around it.
    part = "billing/_top_up.html" if request.headers.get("HX-Request") == "true" else "billing/top_up.html"
    return render(request, part, context)


def _statement_page(
    request: HttpRequest, actor: Actor, *, status: int = 200, form: dict[str, str] | None = None
) -> HttpResponse:
    period_form = PeriodForm(request.GET)
    problem = ""
    try:
        since, until = period_form.wanted()
    except Problem as error:
        problem = error.message
        since, until = period_of_days(None, None, database_now())
    found = selectors.statement(actor.organisation, since, until)
    have = selectors.balances(actor.organisation)
    # A balance that never moved would be a column of nothing.
    shown = [
        name
        for name, _, _ in BALANCES
        if any(
            getattr(row, name) for row in (have, found.opening, found.closing, *(line.moved for line in found.lines))
        )
    ] or ["cash_uusd"]
    labels = {name: label for name, label, _ in BALANCES}
    amounts = [amount for row in (found.opening, *(line.moved for line in found.lines)) for _, amount in row.items()]
    context = {
        "balances": [
            (label, getattr(have, name), words)
            for name, label, words in BALANCES
            if name != "reserve_uusd" or have.reserve_uusd
        ],
        "held": [(*_page_of(ref), ref, amount) for ref, amount in selectors.held_for(actor.organisation)],
        "total_uusd": sum(amount for _, amount in have.items()),
        "columns": [labels[name] for name in shown],
        "opening": _cells(found.opening, shown, labels),
        "closing": _cells(found.closing, shown, labels),
        "days": _days(found, shown, labels),
        "digits": CENTS if all(amount % UUSD_PER_CENT == 0 for amount in amounts) else EXACT,
        "since": found.since,
        "until": found.until,
        "last_day": (found.until - timedelta(microseconds=1)).date(),
        "period_form": period_form,
        "period_problem": problem,
        "query": request.GET.urlencode(),
        "top_ups": selectors.top_ups_of(actor.organisation)[:TOP_UPS_SHOWN],
        "pays": may(actor, Action.PAY),
        "least": format_usd(TOP_UP_LEAST_UUSD, 0),
        "most": format_usd(TOP_UP_MOST_UUSD, 0),
        "form": form or {"amount": ""},
    }
    return render(request, "billing/statement.html", context, status=status)


def _days(found: selectors.Statement, shown: list[str], labels: dict[str, str]) -> list[dict[str, Any]]:
    """The lines, under their days, the newest day first."""
    days: dict[Any, list[dict[str, Any]]] = {}
    for line in found.lines:
        label, url = _page_of(line.ref)
        if line.what in selectors.OF_SALES:
            url = ""  # the page of what was sold is its buyer's
        first, last = (f"{at.astimezone(UTC):%H:%M}" for at in (line.first_at, line.last_at))
        row = {
            "line": line,
            "label": label,
            "url": url,
            "when": first if first == last else f"{first} to {last}",
            "sold_uusd": line.moved.earned_uusd + (line.fee_uusd or 0),
            "cells": _cells(line.moved, shown, labels),
        }
        days.setdefault(line.day, []).append(row)
    return [{"day": day, "rows": rows[::-1]} for day, rows in sorted(days.items(), reverse=True)]


def _cells(row: selectors.Balances, shown: list[str], labels: dict[str, str]) -> list[tuple[str, int]]:
    return [(labels[name], getattr(row, name)) for name in shown]


def _page_of(ref: str) -> tuple[str, str]:
    """What a reference is of, and its page where there is one."""
    label, view = PAGE_OF.get(ref.partition("_")[0], ("", None))
    try:
        return label, reverse(view, args=[ref]) if view else ""
    except NoReverseMatch:
        return label, ""


def _plain(amount_uusd: int) -> str:
    """For programs: no sign of a currency, no commas, every digit."""
    return format_usd(amount_uusd, EXACT).replace("$", "").replace(",", "")
