"""Jobs over REST: submit, watch, cancel, and take the result.

Invariant: a job is submitted once whatever is retried, another organisation's is 404, and what a curve is drawn of is
exactly what was sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from marketplace.training import selectors, services
from marketplace.training.models import (
    Artifact,
    ArtifactKind,
    Job,
    JobEvent,
    JobState,
    Member,
    MemberState,
    Round,
    Seat,
)
from marketplace.training.services.blobs import download_url
from marketplace.training.services.uploads import UPLOADED, announce_upload, refresh_upload
from marketplace.training.spec import JobSpecForm

KEY = OpenApiParameter(HEADER, str, OpenApiParameter.HEADER, required=True, description="The same key: the same job.")
EVENTS_MAX = 500
ROUNDS_MAX = 1_000


class Pages(LimitOffsetPagination):
    default_limit = 50
    max_limit = settings.PAGE_LIMIT


class JobQuery(serializers.Serializer[Any]):
    state = serializers.ChoiceField(choices=JobState.choices, required=False)


class JobOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField()
    state = serializers.ChoiceField(choices=JobState.choices)
    state_since = serializers.DateTimeField()
    reason = serializers.CharField(help_text="Why it stands where it stands, in words.")
    tokens_target = serializers.IntegerField()
    tokens_sealed = serializers.IntegerField()
    rounds_sealed = serializers.IntegerField()
    bits_per_byte_first = serializers.FloatField(allow_null=True, help_text="Held out, before the first round.")
    bits_per_byte_last = serializers.FloatField(allow_null=True, help_text="Held out, of the newest state.")
    islands_now = serializers.IntegerField()
    budget_uusd = serializers.IntegerField()
    spent_uusd = serializers.IntegerField(help_text="Charged for what was delivered.")
    committed_uusd = serializers.IntegerField(help_text="Held for its leases and not charged yet.")
    free_uusd = serializers.IntegerField(help_text="Held for it, in no lease. Zero once the rest has gone back.")
    deadline_at = serializers.DateTimeField(allow_null=True)
    created_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    settled_at = serializers.DateTimeField(allow_null=True, help_text="When the rest of its budget went back.")


class MemberOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    island_id = serializers.CharField()
    island_name = serializers.CharField()
    gpu = serializers.CharField()
    gpus = serializers.IntegerField()
    lease_id = serializers.CharField()
    price_uusd_per_gpu_hour = serializers.IntegerField()
    state = serializers.ChoiceField(choices=MemberState.choices)
    tokens_per_s = serializers.FloatField(allow_null=True, help_text="Of its last round, compute alone.")
    joined_at = serializers.DateTimeField(allow_null=True)
    gone_at = serializers.DateTimeField(allow_null=True)
    gone_why = serializers.CharField()


class JobDetailOut(JobOut):
    spec = serializers.DictField(help_text="As submitted, with what was filled in.")
    parameters = serializers.IntegerField()
    members = MemberOut(many=True)


class EventOut(serializers.Serializer[Any]):
    seq = serializers.IntegerField(help_text="Ask for the events `after` it.")
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    message = serializers.CharField()
    detail = serializers.DictField()


class EventsOut(serializers.Serializer[Any]):
    results = EventOut(many=True)
    last_seq = serializers.IntegerField()


class SeatOut(serializers.Serializer[Any]):
    member_id = serializers.CharField()
    island_name = serializers.CharField()
    steps = serializers.IntegerField()
    submitted = serializers.BooleanField()
    accepted = serializers.BooleanField(allow_null=True)
    refused_why = serializers.CharField()
    tokens = serializers.IntegerField(allow_null=True)
    size_bytes = serializers.IntegerField(allow_null=True)
    norm = serializers.FloatField(allow_null=True)
    compute_ms = serializers.IntegerField(allow_null=True)
    upload_ms = serializers.IntegerField(allow_null=True)
    state_digest = serializers.CharField(help_text="Of the state after the round, as this member holds it.")


class RoundOut(serializers.Serializer[Any]):
    number = serializers.IntegerField()
    opened_at = serializers.DateTimeField()
    sealed_at = serializers.DateTimeField(allow_null=True)
    tokens = serializers.IntegerField()
    tokens_after = serializers.IntegerField()
    train_loss_nats = serializers.FloatField(allow_null=True)
    heldout_bits_per_byte = serializers.FloatField(allow_null=True, help_text="Of the state after the round.")
    spent_uusd = serializers.IntegerField(allow_null=True, help_text="What the job had cost when it was sealed.")
    bytes_sent = serializers.IntegerField()
    state_digest = serializers.CharField(help_text="SHA-256 of the state after the round, the same for all members.")
    seats = SeatOut(many=True)


class MetricsOut(serializers.Serializer[Any]):
    rounds = RoundOut(many=True)
    open_round = RoundOut(allow_null=True)


class ArtifactOut(serializers.Serializer[Any]):
    id = serializers.CharField()
    kind = serializers.ChoiceField(choices=ArtifactKind.choices)
    name = serializers.CharField()
    digest = serializers.CharField()
    size_bytes = serializers.IntegerField()
    stored = serializers.BooleanField()
    round_number = serializers.IntegerField(allow_null=True, help_text="Of a checkpoint: rounds in it.")
    state_digest = serializers.CharField()
    created_at = serializers.DateTimeField()
    url = serializers.CharField(allow_null=True, help_text="Signed, for some minutes.")


class ArtifactIn(serializers.Serializer[Any]):
    kind = serializers.ChoiceField(choices=[kind.value for kind in UPLOADED])
    name = serializers.CharField(max_length=120)
    digest = serializers.CharField(help_text="SHA-256 of the bytes, 64 lower-case hexadecimal digits.")
    size_bytes = serializers.IntegerField(min_value=1)


class UploadOut(serializers.Serializer[Any]):
    method = serializers.CharField()
    url = serializers.CharField()
    headers = serializers.DictField(child=serializers.CharField())


class AnnouncedOut(ArtifactOut):
    upload = UploadOut(allow_null=True, help_text="Where to send the bytes; null when they are here already.")


def job_body(job: Job, money: selectors.Money) -> dict[str, Any]:
    return {
        "id": job.pk,
        "name": job.name,
        "state": job.state,
        "state_since": job.state_since,
        "reason": job.reason,
        "tokens_target": job.tokens_target,
        "tokens_sealed": job.tokens_sealed,
        "rounds_sealed": job.rounds_sealed,
        "bits_per_byte_first": job.bits_per_byte_first,
        "bits_per_byte_last": job.bits_per_byte_last,
        "islands_now": getattr(job, "islands_now", 0),
        "budget_uusd": money.budget_uusd,
        "spent_uusd": money.spent_uusd,
        "committed_uusd": money.committed_uusd,
        "free_uusd": money.free_uusd,
        "deadline_at": job.deadline_at,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "settled_at": job.settled_at,
    }


def member_body(member: Member) -> dict[str, Any]:
    lease = member.lease
    return {
        "id": member.pk,
        "island_id": lease.island_id,
        "island_name": lease.island.name,
        "gpu": lease.island.gpu_id,
        "gpus": lease.gpus,
        "lease_id": lease.pk,
        "price_uusd_per_gpu_hour": lease.price_uusd_per_gpu_hour,
        "state": member.state,
        "tokens_per_s": member.tokens_per_s,
        "joined_at": member.joined_at,
        "gone_at": member.gone_at,
        "gone_why": member.gone_why,
    }


def seat_body(seat: Seat) -> dict[str, Any]:
    return {
        "member_id": seat.member_id,
        "island_name": seat.member.lease.island.name,
        "steps": seat.steps,
        "submitted": seat.submitted_at is not None,
        "accepted": seat.accepted,
        "refused_why": seat.refused_why,
        "tokens": seat.tokens,
        "size_bytes": seat.size_bytes,
        "norm": seat.norm,
        "compute_ms": seat.compute_ms,
        "upload_ms": seat.upload_ms,
        "state_digest": seat.applied_digest,
    }


def round_body(round_: Round) -> dict[str, Any]:
    return {
        "number": round_.number,
        "opened_at": round_.opened_at,
        "sealed_at": round_.sealed_at,
        "tokens": round_.tokens,
        "tokens_after": round_.tokens_before + round_.tokens,
        "train_loss_nats": round_.train_loss_nats,
        "heldout_bits_per_byte": round_.heldout_bits_per_byte,
        "spent_uusd": round_.spent_uusd,
        "bytes_sent": round_.bytes_sent,
        "state_digest": round_.state_digest,
        "seats": [seat_body(seat) for seat in round_.seats.all()],
    }


def artifact_body(artifact: Artifact, request: Request) -> dict[str, Any]:
    url = None
    if artifact.stored_at is not None:
        url = request.build_absolute_uri(download_url(artifact, filename_of(artifact)))
    return {
        "id": artifact.pk,
        "kind": artifact.kind,
        "name": artifact.name,
        "digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
        "stored": artifact.stored_at is not None,
        "round_number": artifact.round_number,
        "state_digest": artifact.state_digest,
        "created_at": artifact.created_at,
        "url": url,
    }


def filename_of(artifact: Artifact) -> str:
    if artifact.kind == ArtifactKind.SNAPSHOT:
        return f"{artifact.job_id}-round-{artifact.round_number}.safetensors"
    return artifact.name or artifact.pk


class JobsView(generics.GenericAPIView[Job]):
    serializer_class = JobOut
    pagination_class = Pages
    queryset = Job.objects.none()

    @extend_schema(operation_id="jobs_list", parameters=[JobQuery], responses=JobOut(many=True))
    def get(self, request: Request) -> Response:
        """The organisation's jobs, newest first."""
        form = JobQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        found = selectors.jobs_of(current_actor(request).organisation)
        if "state" in form.validated_data:
            found = found.filter(state=form.validated_data["state"])
        page: Sequence[Job] = self.paginate_queryset(found) or []
        money = selectors.money_of(page)
        return self.get_paginated_response([job_body(job, money[job.pk]) for job in page])

    @extend_schema(operation_id="jobs_create", parameters=[KEY], request=JobSpecForm, responses={201: JobDetailOut})
    def post(self, request: Request) -> Response:
        """Submit a job. Its whole budget is held at once; what it does not use comes back when it has ended."""
        actor = current_actor(request)
        now = database_now()
        form = JobSpecForm(data=request.data, context={"now": now})
        form.is_valid(raise_exception=True)

        def submit() -> Response:
            job = services.submit_job(actor, form.validated_data, now)
            headers = {"Location": reverse("training:api_job", args=[job.pk])}
            return Response(_detail(actor.organisation, job.pk), status=status.HTTP_201_CREATED, headers=headers)

        return idempotent(request, "jobs", request.data, submit)


class JobView(APIView):
    @extend_schema(operation_id="jobs_retrieve", responses=JobDetailOut)
    def get(self, request: Request, job_id: str) -> Response:
        """How a job stands, what it was asked to do, and on which islands it has been."""
        return Response(_detail(current_actor(request).organisation, job_id))


class JobCancelView(APIView):
    @extend_schema(operation_id="jobs_cancel", request=None, responses=JobDetailOut)
    def post(self, request: Request, job_id: str) -> Response:
        """End a job now. Cancelling twice is cancelling once."""
        actor = current_actor(request)
        services.cancel_job(actor, job_id, database_now())
        return Response(_detail(actor.organisation, job_id))


class EventQuery(serializers.Serializer[Any]):
    after = serializers.IntegerField(required=False, default=0, min_value=0, max_value=2**63 - 1)
    limit = serializers.IntegerField(required=False, default=100, min_value=1, max_value=EVENTS_MAX)


class JobEventsView(APIView):
    @extend_schema(operation_id="jobs_events", parameters=[EventQuery], responses=EventsOut)
    def get(self, request: Request, job_id: str) -> Response:
        """What happened, in order. Ask again with `after` set to `last_seq` for what came since."""
        form = EventQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        job = selectors.job_for(current_actor(request).organisation, job_id)
        after, limit = form.validated_data["after"], form.validated_data["limit"]
        found = list(JobEvent.objects.filter(job=job, pk__gt=after).order_by("pk")[:limit])
        events = [
            {"seq": each.pk, "at": each.at, "kind": each.kind, "message": each.message, "detail": each.detail}
            for each in found
        ]
        return Response({"results": events, "last_seq": found[-1].pk if found else after})


class MetricsQuery(serializers.Serializer[Any]):
    after_round = serializers.IntegerField(required=False, default=-1, min_value=-1, max_value=2**31 - 1)
    limit = serializers.IntegerField(required=False, default=ROUNDS_MAX, min_value=1, max_value=ROUNDS_MAX)


class JobMetricsView(APIView):
    @extend_schema(operation_id="jobs_metrics", parameters=[MetricsQuery], responses=MetricsOut)
    def get(self, request: Request, job_id: str) -> Response:
        """The sealed rounds in order, each with what it cost, what came of it and who took part; and the open one. Ask
        again with `after_round` set to the last number for more."""
        form = MetricsQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        job = selectors.job_for(current_actor(request).organisation, job_id)
        sealed = selectors.rounds_of(job).filter(number__gt=form.validated_data["after_round"])
        opened = selectors.open_round_of(job)
        body = {
            "rounds": [round_body(each) for each in sealed[: form.validated_data["limit"]]],
            "open_round": None if opened is None else round_body(opened),
        }
        return Response(body)


class JobArtifactsView(generics.GenericAPIView[Artifact]):
    serializer_class = ArtifactOut
    pagination_class = Pages
    queryset = Artifact.objects.none()

    @extend_schema(operation_id="jobs_artifacts", responses=ArtifactOut(many=True))
    def get(self, request: Request, job_id: str) -> Response:
        """The job's checkpoints, newest first, each with an address that is signed for some minutes."""
        job = selectors.job_for(current_actor(request).organisation, job_id)
        page: Sequence[Artifact] = self.paginate_queryset(selectors.results_of(job)) or []
        return self.get_paginated_response([artifact_body(each, request) for each in page])


class ArtifactsView(generics.GenericAPIView[Artifact]):
    serializer_class = ArtifactOut
    pagination_class = Pages
    queryset = Artifact.objects.none()

    @extend_schema(operation_id="artifacts_list", responses=ArtifactOut(many=True))
    def get(self, request: Request) -> Response:
        """What the organisation uploaded for its jobs, newest first."""
        found = selectors.uploads_of(current_actor(request).organisation)
        page: Sequence[Artifact] = self.paginate_queryset(found) or []
        return self.get_paginated_response([artifact_body(each, request) for each in page])

    @extend_schema(operation_id="artifacts_create", request=ArtifactIn, responses={200: AnnouncedOut})
    def post(self, request: Request) -> Response:
        """Announce data or code. PUT the bytes to `upload.url`, then name the artifact's id in a job. Bytes are known
        by their digest, so the same announcement again is the same artifact and needs no key."""
        form = ArtifactIn(data=request.data)
        form.is_valid(raise_exception=True)
        unknown = sorted(set(request.data) - set(form.fields)) if isinstance(request.data, dict) else []
        if unknown:
            problems = [FieldProblem(name, "there is no such field") for name in unknown]
            raise InvalidInput("some fields are not right", fields=problems)
        announced = announce_upload(current_actor(request), now=database_now(), **form.validated_data)
        body = {**artifact_body(announced.artifact, request), "upload": None}
        if announced.upload is not None:
            url = request.build_absolute_uri(announced.upload.url)
            body["upload"] = {"method": "PUT", "url": url, "headers": announced.upload.headers}
        return Response(body)


class ArtifactView(APIView):
    @extend_schema(operation_id="artifacts_retrieve", responses=ArtifactOut)
    def get(self, request: Request, artifact_id: str) -> Response:
        """One artifact, and whether its bytes have arrived."""
        artifact = selectors.artifact_for(current_actor(request).organisation, artifact_id)
        return Response(artifact_body(refresh_upload(artifact, database_now()), request))


def _detail(organisation: Any, job_id: str) -> dict[str, Any]:
    job = selectors.job_for(organisation, job_id)
    money = selectors.money_of([job])[job.pk]
    members = [member_body(member) for member in selectors.members_of(job)]
    return {**job_body(job, money), "spec": job.spec, "parameters": job.parameters, "members": members}
