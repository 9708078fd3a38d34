"""The S3 store against an S3 server over real HTTP: bytes go to it and come from it by presigned addresses alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from marketplace.core.errors import Conflict, NotFound
from marketplace.training.store import URL_LIFE_S, S3Store, s3_store
from tests.servers import s3_server

DATA = b"a pseudo-gradient"
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store() -> Iterator[S3Store]:
    with s3_server() as url:
        yield s3_store("artifacts", url, "us-east-1", "key", "secret")


def put(store: S3Store, data: bytes, digest: str = DIGEST) -> httpx.Response:
    upload = store.upload(digest, len(data), "art_1")
    return httpx.put(upload.url, content=data, headers=upload.headers, trust_env=False)


def test_what_was_sent_to_its_presigned_address_is_there_and_comes_back(store: S3Store) -> None:
    assert store.size(DIGEST) is None
    assert put(store, DATA).status_code == 200
    assert store.size(DIGEST) == len(DATA)
    assert store.read(DIGEST, 1_000) == DATA
    answer = httpx.get(store.download(DIGEST, len(DATA), "round 3.safetensors"), trust_env=False)
    assert answer.content == DATA
    assert answer.headers["Content-Disposition"] == 'attachment; filename="round-3.safetensors"'


def test_an_address_is_for_one_object_one_size_one_digest_and_some_minutes(store: S3Store) -> None:
    query = parse_qs(urlsplit(store.upload(DIGEST, len(DATA), "art_1").url).query)
    signed = query["X-Amz-SignedHeaders"][0].split(";")
    assert {"content-length", "host", "x-amz-checksum-sha256"} <= {*signed, *(name.lower() for name in query)}
    assert query["X-Amz-Expires"] == [str(URL_LIFE_S)]
    assert "secret" not in str(query)


def test_what_is_not_there_is_said_so(store: S3Store) -> None:
    with pytest.raises(NotFound):
        store.read(DIGEST, 1_000)
    store.drop(DIGEST)


def test_bytes_under_a_foreign_digest_are_not_believed(store: S3Store) -> None:
    other = hashlib.sha256(b"other bytes").hexdigest()
    store.client.put_object(Bucket="artifacts", Key=store.key(other), Body=DATA)
    with pytest.raises(Conflict, match="another digest"):
        store.read(other, 1_000)
    with pytest.raises(Conflict, match="more than 4 bytes"):
        store.read(other, 4)


def test_what_was_dropped_is_gone(store: S3Store) -> None:
    put(store, DATA)
    store.drop(DIGEST)
    assert store.size(DIGEST) is None
