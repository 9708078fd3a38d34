"""Artifacts: bytes announced, seen, handed out, and dropped once nothing needs them.

Invariant: a blob is handed to a member only if it belongs to the member's job or to what the job's run names, and it
belongs to whoever sent its bytes: knowing a digest opens nothing. The store is never called inside a transaction; a row
is deleted before its bytes, and bytes another row still names are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Max, Q

from marketplace.core.errors import InvalidInput, NotFound
from marketplace.training.models import ENDED, Artifact, ArtifactKind, Job, JobState, Member, Seat
from marketplace.training.services.rounds import run_of
from marketplace.training.store import LocalStore, Store, current_store, demand_digest, demand_size
from worker_agent.protocol import BlobData, BlobPutReply, BlobPutRequest, BlobUrlsReply, BlobUrlsRequest, ModuleModel

DIGESTS_MAX = 256
KEEP_ROUNDS = 2  # payloads of the last rounds: a member that applies late must not have to take a snapshot
KEEP_SNAPSHOTS = 3  # of a job that goes on; the last of a job that ended is its result
FORGOTTEN = timedelta(hours=1)  # announced or sent, and named by nothing since


def announce(job: Job, request: BlobPutRequest, now: datetime) -> Artifact:
    """Bytes are to come. The same digest again is the same artifact."""
    demand_digest(request.digest)
    demand_size(request.size_bytes)
    artifact, _ = Artifact.objects.get_or_create(
        organisation_id=job.organisation_id,
        job=job,
        digest=request.digest,
        defaults={"kind": ArtifactKind.PAYLOAD, "size_bytes": request.size_bytes, "created_at": now},
    )
    if artifact.size_bytes != request.size_bytes:
        if artifact.stored_at is not None:
            raise InvalidInput.at("size_bytes", f"the bytes of this digest are {artifact.size_bytes:,}")
        Artifact.objects.filter(pk=artifact.pk, stored_at=None).update(size_bytes=request.size_bytes)
        artifact.size_bytes = request.size_bytes
    return artifact


def put_blob(member: Member, request: BlobPutRequest, now: datetime) -> BlobPutReply:
    """Where to send the bytes; nowhere, if this job's bytes are there already."""
    artifact = announce(member.job, request, now)
    store = current_store()
    if artifact.stored_at is not None and store.size(artifact.digest) == artifact.size_bytes:
        return BlobPutReply(exists=True)
    upload = store.upload(artifact.digest, artifact.size_bytes, artifact.pk)
    return BlobPutReply(exists=False, url=upload.url, headers=upload.headers)


def note_stored(artifact_id: str, now: datetime) -> None:
    """Its bytes have been seen."""
    Artifact.objects.filter(pk=artifact_id, stored_at=None).update(stored_at=now)


def seen(job: Job, digest: str, size_bytes: int, now: datetime) -> Artifact | None:
    """The job's artifact of this digest, once its bytes are in the store; None until then."""
    artifact = Artifact.objects.filter(job=job, digest=digest).first()
    if artifact is None or artifact.size_bytes != size_bytes:
        return None
    if artifact.stored_at is None:
        # Bytes of this digest may lie there for somebody else. Our own web server notes who sent them; S3 does not tell
        # us, and there a digest that was made nowhere else is taken for the bytes.
        store = current_store()
        if isinstance(store, LocalStore) or store.size(digest) != size_bytes:
            return None
        note_stored(artifact.pk, now)
        artifact.stored_at = now
    return artifact


def blob_urls(member: Member, request: BlobUrlsRequest) -> BlobUrlsReply:
    """Addresses of what the member may read. One without bytes has none; one of another job is as one without."""
    if len(request.digests) > DIGESTS_MAX:
        raise InvalidInput.at("digests", f"at most {DIGESTS_MAX} at once")
    for index, digest in enumerate(request.digests):
        demand_digest(digest, f"digests.{index}")
    job = member.job
    own = Q(job=job) | Q(job=None, digest__in=_named_by(job))
    rows = Artifact.objects.filter(
        own, organisation_id=job.organisation_id, digest__in=request.digests, stored_at__isnull=False
    )
    sizes = dict(rows.values_list("digest", "size_bytes"))
    store = current_store()
    return BlobUrlsReply(urls={digest: store.download(digest, size) for digest, size in sizes.items()})


def download_url(artifact: Artifact, filename: str = "") -> str:
    """Where a person gets the artifact from; relative to our own address on a local store."""
    if artifact.stored_at is None:
        raise NotFound("its bytes have not arrived")
    return current_store().download(artifact.digest, artifact.size_bytes, filename)


def _named_by(job: Job) -> list[str]:
    """What the run itself reads, uploaded by the organisation beforehand."""
    run, named = run_of(job), []
    if isinstance(run.data, BlobData):
        named.append(run.data.digest)
    if isinstance(run.model, ModuleModel) and run.model.artifact:
        named.append(run.model.artifact)
    return named


def sweep_blobs(now: datetime, store: Store | None = None) -> int:
    """Drop what no member can need again: payloads below the newest snapshot and the last rounds, snapshots but the
    last few, and what was announced or sent and never named. Returns how many artifacts went."""
    store = store or current_store()
    dropped = 0
    jobs = Job.objects.filter(artifacts__kind__in=[ArtifactKind.PAYLOAD, ArtifactKind.SNAPSHOT]).distinct()
    for job in jobs:
        dropped += _drop(_unneeded(job, now), store)
    if isinstance(store, LocalStore):
        store.drop_leftovers((now - FORGOTTEN).timestamp())
    return dropped


def _unneeded(job: Job, now: datetime) -> list[Artifact]:
    snapshots = Artifact.objects.filter(job=job, kind=ArtifactKind.SNAPSHOT, stored_at__isnull=False)
    newest = snapshots.aggregate(top=Max("round_number"))["top"] or 0
    over = job.state in ENDED or (job.state == JobState.FINISHING and newest >= job.rounds_sealed)
    needed_from = newest if over else min(newest, max(0, job.rounds_sealed - KEEP_ROUNDS))
    wanted = Seat.objects.filter(round__job=job, round__number__gte=needed_from).exclude(digest="").values("digest")
    payloads = Artifact.objects.filter(job=job, kind=ArtifactKind.PAYLOAD).exclude(digest__in=wanted)
    counted = Seat.objects.filter(round__job=job).exclude(digest="").values("digest")
    # What is in no seat may be on its way to one: it is given time.
    stale = payloads.filter(Q(digest__in=counted) | Q(created_at__lt=now - FORGOTTEN))
    return [*stale, *snapshots.order_by("-round_number")[1 if over else KEEP_SNAPSHOTS :]]


def _drop(artifacts: Iterable[Artifact], store: Store) -> int:
    dropped = 0
    for artifact in artifacts:
        with transaction.atomic():
            gone, _ = Artifact.objects.filter(pk=artifact.pk).delete()
            shared = Artifact.objects.filter(digest=artifact.digest).exists()
        if not shared:
            store.drop(artifact.digest)
        dropped += gone
    return dropped
