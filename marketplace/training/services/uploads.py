"""What customers bring themselves: data and code, announced by digest, sent to the store, named by jobs.

Invariant: the same bytes of one organisation are one upload; its bytes count once the store has proved them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.core.errors import InvalidInput
from marketplace.training.models import Artifact, ArtifactKind
from marketplace.training.services.blobs import note_stored
from marketplace.training.store import LocalStore, Upload, current_store, demand_digest, demand_size

UPLOADED = (ArtifactKind.DATASET, ArtifactKind.MODULE)
NAME_LENGTH = 120


@dataclass(frozen=True)
class Announced:
    """`upload` None: the bytes are there already, nothing is to be sent."""

    artifact: Artifact
    upload: Upload | None


def announce_upload(actor: Actor, *, kind: str, name: str, digest: str, size_bytes: int, now: datetime) -> Announced:
    demand(actor, Action.WORK)
    if kind not in UPLOADED:
        raise InvalidInput.at("kind", f"must be one of {', '.join(UPLOADED)}")
    clean = " ".join(name.split())
    if not clean or len(clean) > NAME_LENGTH or not clean.isprintable():
        raise InvalidInput.at("name", f"from 1 to {NAME_LENGTH} printable characters")
    demand_digest(digest)
    demand_size(size_bytes)
    artifact, made = Artifact.objects.get_or_create(
        organisation=actor.organisation,
        job=None,
        digest=digest,
        defaults={"kind": kind, "name": clean, "size_bytes": size_bytes, "created_at": now},
    )
    if artifact.size_bytes != size_bytes:
        raise InvalidInput.at("size_bytes", f"these bytes were announced as {artifact.size_bytes:,}")
    if made:
        record(actor.organisation, actor.name, "artifact.announced", artifact.pk, kind=kind, size_bytes=size_bytes)
    store = current_store()
    if artifact.stored_at is not None and store.size(digest) == size_bytes:
        return Announced(artifact, None)
    return Announced(artifact, store.upload(digest, size_bytes, artifact.pk))


def refresh_upload(artifact: Artifact, now: datetime) -> Artifact:
    """Whether its bytes have arrived. Our own server notes them as they come; S3 is asked."""
    if artifact.stored_at is None:
        store = current_store()
        if not isinstance(store, LocalStore) and store.size(artifact.digest) == artifact.size_bytes:
            note_stored(artifact.pk, now)
            artifact.stored_at = now
    return artifact
