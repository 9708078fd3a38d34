"""The pages of jobs: the list, the form, and the job itself, live.

Invariant: a page works without scripts and is only refreshed by them; a form that is refused comes back as it was typed
with what is wrong beside the field; a job of another organisation is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pprint import pformat
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from rest_framework.exceptions import ValidationError

from marketplace.accounts.access import Action, Actor, current_actor, may
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.money import parse_usd
from marketplace.core.tickets import FIELD, Tickets
from marketplace.training import selectors, services, timeline
from marketplace.training.models import ENDED, Job, JobEvent, Member, Round
from marketplace.training.models import job_id as new_job_id
from marketplace.training.services.blobs import download_url
from marketplace.training.spec import JobSpecForm, parameters_of
from marketplace.training.timeline import Place, Work, spark

PAGE = 25
_tickets = Tickets("training.job")
EVENTS_SHOWN = 40
ROUNDS_SHOWN = 12
CURVE_POINTS = 500
SPARK_POINTS = 60
CODECS = ("int4", "int8", "bf16", "fp32")
# What the form starts with: a run small enough to be watched to its end, on any island.
FIRST: dict[str, str] = {
    "name": "my first run",
    "n_layer": "2",
    "n_head": "4",
    "d_model": "64",
    "context": "64",
    "tokens": "1500000",
    "batch_tokens": "1024",
    "budget_usd": "20",
    "deadline": "",
    "min_islands": "1",
    "max_islands": "4",
    "gpus": "",
    "min_vram_gib": "",
    "codec": "int4",
    "inner_steps": "",
}


@login_required
@never_cache
@require_safe
def jobs(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    page = Paginator(selectors.jobs_of(actor.organisation), PAGE).get_page(request.GET.get("page"))
    shown: Sequence[Job] = list(page)
    money = selectors.money_of(shown)
    curves = _curves([job.pk for job in shown])
    rows = [
        {
            "job": job,
            "money": money[job.pk],
            "spark": spark(curves.get(job.pk, [])),
            "share": _percent(job.tokens_sealed, job.tokens_target),
        }
        for job in shown
    ]
    live = any(job.state not in ENDED for job in shown)
    context = {"rows": rows, "page": page, "live": live, "may_work": may(actor, Action.WORK)}
    return render(request, "training/jobs.html", context)


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def new_job(request: HttpRequest) -> HttpResponse:
    """A form for the common case; the call it makes stands beside it for all others."""
    typed = {name: request.POST.get(name, "") for name in FIRST} if request.method == "POST" else dict(FIRST)
    if request.method == "GET":
        return _form(request, typed, status=200)
    actor, now = current_actor(request), database_now()
    spec, errors = _asked(typed)
    if not errors:
        form = JobSpecForm(data=spec, context={"now": now})
        try:
            form.is_valid(raise_exception=True)
            key = _tickets.read(request.POST.get(FIELD, ""))
            job = services.submit_job(actor, form.validated_data, now, key=key)
        except ValidationError as error:
            errors = _by_field(error.detail)
        except Problem as problem:
            errors = {_field(each.field): each.message for each in problem.fields}
            return _form(request, typed, status=problem.status, errors=errors, problem=problem)
        else:
            messages.success(request, "The job is submitted, and its budget is held.")
            return redirect("training:job", job.pk)
    return _form(request, typed, status=InvalidInput.status, errors=errors)


@login_required
@never_cache
@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """What the form would send, and what can be said of it; writes nothing."""
    typed = {name: request.POST.get(name, "") for name in FIRST}
    return render(request, "training/_call.html", _call(request, typed))


@login_required
@never_cache
@require_safe
def job(request: HttpRequest, job_id: str) -> HttpResponse:
    actor = current_actor(request)
    found = selectors.job_for(actor.organisation, job_id)
    return render(request, "training/job.html", _standing(found, actor))


@login_required
@never_cache
@require_safe
def live(request: HttpRequest, job_id: str) -> HttpResponse:
    """The parts of a job's page that move."""
    actor = current_actor(request)
    found = selectors.job_for(actor.organisation, job_id)
    return render(request, "training/_live.html", _standing(found, actor))


@login_required
@never_cache
@require_safe
def curve(request: HttpRequest, job_id: str) -> JsonResponse:
    """Held-out bits per byte and training loss against tokens, dollars or time."""
    found = selectors.job_for(current_actor(request).organisation, job_id)
    rounds = list(selectors.thinned(selectors.rounds_of(found).prefetch_related(None), CURVE_POINTS))
    began = found.started_at or found.created_at
    heldout = [_point(each, began, each.heldout_bits_per_byte) for each in rounds]
    if found.bits_per_byte_first is not None:
        heldout.insert(0, {"tokens": 0, "uusd": 0, "ms": 0, "y": found.bits_per_byte_first})
    trained = [_point(each, began, _bits(each.train_loss_nats)) for each in rounds]
    return JsonResponse(
        {
            "y_label": "bits per byte" if _is_bytes(found) else "bits per token",
            "axes": [
                {"key": "tokens", "label": "Tokens", "unit": "count"},
                {"key": "uusd", "label": "US dollars", "unit": "usd"},
                {"key": "ms", "label": "Time", "unit": "s"},
            ],
            "series": [
                {"name": "held out", "points": [point for point in heldout if point["y"] is not None]},
                {"name": "training", "points": [point for point in trained if point["y"] is not None]},
            ],
            "live": found.state not in ENDED,
        }
    )


@login_required
@require_POST
def cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    try:
        services.cancel_job(current_actor(request), job_id, database_now())
    except Problem as problem:
        messages.error(request, f"Nothing was changed: {problem.message}.")
    else:
        messages.success(request, "The job is cancelled. What it did not use comes back once its islands are settled.")
    return redirect("training:job", job_id)


@login_required
@require_safe
def checkpoint(request: HttpRequest, job_id: str, artifact_id: str) -> HttpResponse:
    """To the bytes: a signed address is made when it is asked for, so that no page holds one that has run out."""
    found = selectors.job_for(current_actor(request).organisation, job_id)
    artifact = selectors.results_of(found).filter(pk=artifact_id).first()
    if artifact is None:
        messages.error(request, "This checkpoint is no longer kept.")
        return redirect("training:job", job_id)
    return redirect(download_url(artifact, f"{found.pk}-round-{artifact.round_number}.safetensors"))


# ------------------------------------------------------------------------------------------------------ a job's page


def _standing(found: Job, actor: Actor) -> dict[str, Any]:
    now = database_now()
    money = selectors.money_of([found])[found.pk]
    members = list(selectors.members_of(found))
    sealed = list(selectors.rounds_of(found).filter(number__gte=found.rounds_sealed - timeline.ROUNDS_SHOWN))
    opened = selectors.open_round_of(found)
    rounds = sealed + ([opened] if opened else [])
    before = max(0, found.rounds_sealed - len(sealed))
    places = [_place(member) for member in members]
    picture = timeline.timeline_of(places, _works(rounds), now=found.ended_at or now, rounds_before=before)
    used = _percent(money.spent_uusd, money.budget_uusd)
    return {
        "job": found,
        "money": money,
        "members": members,
        "timeline": picture,
        "rounds": [_row(each) for each in reversed(sealed[-ROUNDS_SHOWN:])],
        "rounds_total": found.rounds_sealed,
        "bytes_sent": Round.objects.filter(job=found).aggregate(sent=Sum("bytes_sent"))["sent"] or 0,
        # Sealed rounds have a table of their own.
        "events": list(JobEvent.objects.filter(job=found).exclude(kind="sealed").order_by("-pk")[:EVENTS_SHOWN]),
        "checkpoints": list(selectors.results_of(found)[:3]),
        "used": used,
        "held": min(100 - used, _percent(money.committed_uusd, money.budget_uusd)),
        "share": _percent(found.tokens_sealed, found.tokens_target),
        "live": found.settled_at is None,
        "may_cancel": may(actor, Action.WORK) and found.state not in ENDED,
        "is_bytes": _is_bytes(found),
        "now": now,
    }


def _row(round_: Round) -> dict[str, Any]:
    seats = list(round_.seats.all())
    return {
        "round": round_,
        "counted": [seat.member.lease.island.name for seat in seats if seat.accepted],
        "left_out": [(seat.member.lease.island.name, seat.refused_why) for seat in seats if seat.accepted is False],
        "agreed": sum(bool(seat.applied_digest) and seat.applied_digest == round_.state_digest for seat in seats),
        "differed": sum(bool(seat.applied_digest) and seat.applied_digest != round_.state_digest for seat in seats),
    }


def _place(member: Member) -> Place:
    return Place(
        member_id=member.pk,
        name=member.lease.island.name,
        joined_at=member.joined_at,
        created_at=member.created_at,
        gone_at=member.gone_at,
        gone_why=member.gone_why,
    )


def _works(rounds: Sequence[Round]) -> list[Work]:
    return [
        Work(
            member_id=seat.member_id,
            number=each.number,
            opened_at=each.opened_at,
            sealed_at=each.sealed_at,
            compute_ms=seat.compute_ms,
            upload_ms=seat.upload_ms,
            submitted_at=seat.submitted_at,
            accepted=seat.accepted,
            refused_why=seat.refused_why,
        )
        for each in rounds
        for seat in each.seats.all()
    ]


def _point(round_: Round, began: datetime, y: float | None) -> dict[str, Any]:
    took = (round_.sealed_at or began) - began
    return {
        "tokens": round_.tokens_before + round_.tokens,
        "uusd": round_.spent_uusd or 0,
        "ms": int(took.total_seconds() * 1000),
        "y": y,
    }


def _bits(nats: float | None) -> float | None:
    return None if nats is None else nats / 0.6931471805599453


def _is_bytes(found: Job) -> bool:
    return bool(found.run["model"].get("vocab_size", 256) == 256)


def _curves(job_ids: Sequence[str]) -> dict[str, list[float]]:
    sealed = Round.objects.filter(job__in=job_ids, heldout_bits_per_byte__isnull=False)
    rows = selectors.thinned(sealed, SPARK_POINTS).order_by("job_id", "number")
    curves: dict[str, list[float]] = {}
    for key, bits in rows.values_list("job_id", "heldout_bits_per_byte"):
        curves.setdefault(key, []).append(bits or 0.0)
    return curves


def _percent(part: int, whole: int) -> int:
    return min(100, round(100 * part / whole)) if whole else 0


# --------------------------------------------------------------------------------------------------------- the form


_FIELD_OF = {
    "model.n_layer": "n_layer",
    "model.n_head": "n_head",
    "model.d_model": "d_model",
    "model.context": "context",
    "budget_uusd": "budget_usd",
    "amount_uusd": "budget_usd",
    "deadline_at": "deadline",
    "gpus.allowed": "gpus",
    "gpus.min_vram_gib": "min_vram_gib",
    "sync.inner_steps": "inner_steps",
}
_WHOLE = ("n_layer", "n_head", "d_model", "context", "tokens", "batch_tokens", "min_islands", "max_islands")


def _asked(typed: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The spec of what was typed, as the API takes it, and what could not be read."""
    errors: dict[str, str] = {}
    whole: dict[str, int] = {}
    for name in (*_WHOLE, "min_vram_gib", "inner_steps"):
        text = typed[name].replace(",", "").replace("_", "").replace(" ", "")
        if not text and name not in _WHOLE:
            continue
        if not text.isdecimal() or len(text) > 18:
            errors[name] = "a whole number is needed"
        else:
            whole[name] = int(text)
    budget_uusd = 0
    try:
        budget_uusd = parse_usd(typed["budget_usd"] or "nothing", "budget_usd")
    except InvalidInput as problem:
        errors["budget_usd"] = problem.message
    deadline = None
    if typed["deadline"]:
        try:
            deadline = datetime.fromisoformat(typed["deadline"]).replace(tzinfo=UTC).isoformat()
        except ValueError:
            errors["deadline"] = "a date and time are needed"
    allowed = [name.strip() for name in typed["gpus"].split(",") if name.strip()]
    spec: dict[str, Any] = {
        "name": typed["name"],
        "model": {"kind": "gpt", **{name: whole.get(name, 0) for name in ("n_layer", "n_head", "d_model", "context")}},
        "data": {"kind": "builtin", "name": "python-stdlib"},
        "tokens": whole.get("tokens", 0),
        "batch_tokens": whole.get("batch_tokens", 0),
        "budget_uusd": budget_uusd,
        "min_islands": whole.get("min_islands", 0),
        "max_islands": whole.get("max_islands", 0),
        "sync": "auto",
    }
    if deadline:
        spec["deadline_at"] = deadline
    if allowed or "min_vram_gib" in whole:
        spec["gpus"] = {"allowed": allowed or None, "min_vram_gib": whole.get("min_vram_gib")}
    if "inner_steps" in whole or typed["codec"] not in ("", "int4"):
        spec["sync"] = {"inner_steps": whole.get("inner_steps", 30), "codec": typed["codec"]}
    return spec, errors


def _by_field(detail: Any, path: str = "") -> dict[str, str]:
    """DRF's nested errors by the name of the form's field."""
    if isinstance(detail, dict):
        found: dict[str, str] = {}
        for name, each in detail.items():
            found |= _by_field(each, path if name == "non_field_errors" else f"{path}.{name}".lstrip("."))
        return found
    words = detail[0] if isinstance(detail, list) and detail else detail
    if isinstance(words, dict):
        return _by_field(words, path)
    return {_field(path) or "name": str(words)}


def _field(path: str) -> str:
    """The form's field for a path of the spec; an item of a list belongs to the list's field."""
    path = re.sub(r"(\.\d+)+$", "", path)
    return _FIELD_OF.get(path, path.rsplit(".", 1)[-1])


def _form(
    request: HttpRequest,
    typed: dict[str, str],
    *,
    status: int,
    errors: dict[str, str] | None = None,
    problem: Problem | None = None,
) -> HttpResponse:
    said = {"typed": typed, "errors": errors or {}, "problem": problem, "codecs": CODECS}
    context = {**said, "ticket": _tickets.issue(new_job_id()), **_call(request, typed)}
    return render(request, "training/new_job.html", context, status=status)


def _call(request: HttpRequest, typed: dict[str, str]) -> dict[str, Any]:
    """The same submission as a call, and what can be said of it before."""
    spec, unread = _asked(typed)
    body = json.dumps(spec, indent=2)
    url = request.build_absolute_uri(reverse("training:api_jobs"))
    curl = (
        f"curl {url} \\\n  -H 'Authorization: Bearer YOUR_KEY' \\\n  -H 'Idempotency-Key: choose-one' \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d '{body}'"
    )
    python = (
        f"import httpx\n\nhttpx.post(\n    {url!r},\n    headers={{'Authorization': 'Bearer YOUR_KEY',"
        f" 'Idempotency-Key': 'choose-one'}},\n    json={_python(spec)},\n).raise_for_status()"
    )
    form = JobSpecForm(data=spec, context={"now": database_now()})
    fine = not unread and form.is_valid()
    return {
        "curl": curl,
        "python": python,
        "parameters": parameters_of(form.validated_data["model"]) if fine else None,
    }


def _python(spec: dict[str, Any]) -> str:
    return pformat(spec, sort_dicts=False, width=88).replace("\n", "\n    ")
