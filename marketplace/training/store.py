"""Where bytes lie: objects named by the SHA-256 of their content, on the local disk or in an S3-compatible store.

Invariant: an object appears under its name whole or not at all, and only if its bytes have that digest. The local store
checks while it writes; S3 checks the checksum that the signed upload demands. What is read back is hashed again, since
bytes that others vouch for decide what counts. Dropping what is not there is no error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from django.conf import settings
from django.core import signing

from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

URL_LIFE_S = 15 * 60
CHUNK_BYTES = 1 << 20
# One PUT of S3 takes no more; larger objects would have to go up in parts.
OBJECT_LIMIT_BYTES = 5 * 1024**3
LOCAL_PATH = "/artifacts/"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_signer = signing.TimestampSigner(salt="marketplace.training.store")


@dataclass(frozen=True)
class Upload:
    """How the bytes are to be sent: PUT to `url` with `headers`."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ticket:
    """What a signed local address allows: to read, or to write exactly this object for this artifact."""

    operation: str
    digest: str
    size_bytes: int
    artifact_id: str


class Store(Protocol):
    def size(self, digest: str) -> int | None:
        """Bytes of the object; None where there is none."""

    def read(self, digest: str, limit_bytes: int) -> bytes:
        """The whole object, proved; NotFound, or Conflict where the bytes are not what their name says."""

    def drop(self, digest: str) -> None: ...

    def upload(self, digest: str, size_bytes: int, artifact_id: str) -> Upload: ...

    def download(self, digest: str, size_bytes: int, filename: str = "") -> str:
        """An address to GET the object from, good for a quarter of an hour; with `filename`, to be saved as that."""


def demand_digest(digest: str, name: str = "digest") -> str:
    if not _DIGEST.fullmatch(digest):
        raise InvalidInput.at(name, "must be the SHA-256 in 64 lower-case hexadecimal digits")
    return digest


def demand_size(size_bytes: int, name: str = "size_bytes") -> int:
    if not 0 < size_bytes <= OBJECT_LIMIT_BYTES:
        raise InvalidInput.at(name, f"must be between 1 and {OBJECT_LIMIT_BYTES:,}")
    return size_bytes


def current_store() -> Store:
    """The store the settings name: S3 where there is a bucket, else this machine's disk."""
    if settings.S3_BUCKET:
        return s3_store(
            settings.S3_BUCKET,
            settings.S3_ENDPOINT_URL,
            settings.S3_REGION,
            settings.S3_ACCESS_KEY_ID,
            settings.S3_SECRET_ACCESS_KEY,
        )
    return LocalStore(Path(settings.ARTIFACT_DIR))


# ---------------------------------------------------------------------------------------------------- the local disk


@dataclass(frozen=True)
class LocalStore:
    """Files below one folder, served by our own web server at signed addresses (training/artifact_views)."""

    folder: Path

    def path(self, digest: str) -> Path:
        return self.folder / "sha256" / digest[:2] / demand_digest(digest)

    def size(self, digest: str) -> int | None:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, limit_bytes: int) -> bytes:
        try:
            with open(self.path(digest), "rb") as file:
                data = file.read(limit_bytes + 1)
        except FileNotFoundError:
            raise NotFound("the store has no such object") from None
        return _proved(data, digest, limit_bytes)

    def write(self, digest: str, size_bytes: int, chunks: Iterable[bytes]) -> None:
        """Take the bytes in; InvalidInput where they are not those announced. Existing bytes are proved as well: who
        sends them shows that it has them."""
        target = self.path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{digest}.{secrets.token_hex(8)}.part")
        hasher, seen = hashlib.sha256(), 0
        try:
            with open(temporary, "xb") as file:
                for chunk in chunks:
                    seen += len(chunk)
                    if seen > size_bytes:
                        raise InvalidInput.at("size_bytes", f"more than the {size_bytes:,} bytes announced")
                    hasher.update(chunk)
                    file.write(chunk)
                if seen != size_bytes:
                    raise InvalidInput.at("size_bytes", f"{seen:,} bytes, and {size_bytes:,} were announced")
                if hasher.hexdigest() != digest:
                    raise InvalidInput.at("digest", "the bytes have another digest")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def drop(self, digest: str) -> None:
        self.path(digest).unlink(missing_ok=True)

    def upload(self, digest: str, size_bytes: int, artifact_id: str) -> Upload:
        token = _signed("put", digest, size_bytes, artifact_id)
        return Upload(LOCAL_PATH + token, {"Content-Type": "application/octet-stream"})

    def download(self, digest: str, size_bytes: int, filename: str = "") -> str:
        return LOCAL_PATH + _signed("get", digest, size_bytes, filename)

    def drop_leftovers(self, before_s: float) -> int:
        """Parts of uploads that never came to an end, last written before that Unix time."""
        dropped = 0
        for part in self.folder.glob("sha256/*/.*.part"):
            with contextlib.suppress(FileNotFoundError):  # its upload ended meanwhile
                if part.stat().st_mtime < before_s:
                    part.unlink()
                    dropped += 1
        return dropped


def read_ticket(token: str, operation: str) -> Ticket:
    """The ticket of a local address; Forbidden where it is not ours, too old, or for something else."""
    try:
        found, digest, size_bytes, artifact_id = _signer.unsign_object(token, max_age=URL_LIFE_S)
    except signing.SignatureExpired as error:
        raise Forbidden("this address has expired", code="expired") from error
    except (signing.BadSignature, ValueError) as error:
        raise Forbidden("this address is not signed by us", code="bad_signature") from error
    if found != operation:
        raise Forbidden("this address is for something else", code="bad_signature")
    return Ticket(found, digest, size_bytes, artifact_id)


def _signed(*parts: Any) -> str:
    return _signer.sign_object(parts, compress=True)


# ---------------------------------------------------------------------------------------------------------------- S3


@dataclass(frozen=True)
class S3Store:
    """A bucket of any S3-compatible store. Bytes go to and from it directly; only payloads pass through us."""

    client: S3Client
    bucket: str

    def key(self, digest: str) -> str:
        return f"sha256/{demand_digest(digest)}"

    def size(self, digest: str) -> int | None:
        from botocore.exceptions import ClientError

        try:
            return self.client.head_object(Bucket=self.bucket, Key=self.key(digest))["ContentLength"]
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                return None
            raise

    def read(self, digest: str, limit_bytes: int) -> bytes:
        from botocore.exceptions import ClientError

        try:
            body = self.client.get_object(Bucket=self.bucket, Key=self.key(digest))["Body"]
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                raise NotFound("the store has no such object") from None
            raise
        with contextlib.closing(body):
            return _proved(body.read(limit_bytes + 1), digest, limit_bytes)

    def drop(self, digest: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.key(digest))

    def upload(self, digest: str, size_bytes: int, artifact_id: str) -> Upload:
        checksum = base64.b64encode(bytes.fromhex(demand_digest(digest))).decode()
        url = self.client.generate_presigned_url(
            "put_object",
            Params={
                "Bucket": self.bucket,
                "Key": self.key(digest),
                "ContentLength": size_bytes,
                "ChecksumSHA256": checksum,
            },
            ExpiresIn=URL_LIFE_S,
        )
        return Upload(url, {"x-amz-checksum-sha256": checksum, "Content-Length": str(size_bytes)})

    def download(self, digest: str, size_bytes: int, filename: str = "") -> str:
        params = {"Bucket": self.bucket, "Key": self.key(digest)}
        if filename:
            params["ResponseContentDisposition"] = f'attachment; filename="{plain_filename(filename)}"'
        return self.client.generate_presigned_url("get_object", Params=params, ExpiresIn=URL_LIFE_S)


@lru_cache(maxsize=4)
def s3_store(bucket: str, endpoint_url: str | None, region: str, key_id: str, secret: str) -> S3Store:
    """One client a process: making it reads the service's description, and it is safe to share between threads."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=region,
        aws_access_key_id=key_id or None,
        aws_secret_access_key=secret or None,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint_url else "auto"},
            connect_timeout=5,
            read_timeout=30,
            retries={"max_attempts": 3, "mode": "standard"},
        ),
    )
    return S3Store(client, bucket)


# ------------------------------------------------------------------------------------------------------------ shared


def plain_filename(name: str) -> str:
    """A name that is safe inside a header and on any disk."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "artifact"


def chunks_of(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _proved(data: bytes, digest: str, limit_bytes: int) -> bytes:
    if len(data) > limit_bytes:
        raise Conflict(f"the object has more than {limit_bytes:,} bytes", code="too_large")
    if hashlib.sha256(data).hexdigest() != digest:
        raise Conflict("the object's bytes have another digest", code="digest")
    return data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
