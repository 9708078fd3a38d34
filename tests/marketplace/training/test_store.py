"""The store on the server's own disk: objects by their digest, at signed addresses, for one thing, for a while."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from marketplace.training import store as stores
from marketplace.training.store import (
    OBJECT_LIMIT_BYTES,
    URL_LIFE_S,
    LocalStore,
    current_store,
    plain_filename,
    read_ticket,
)

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(own_store: Path) -> LocalStore:
    found = current_store()
    assert isinstance(found, LocalStore)
    return found


def token(url: str) -> str:
    return url.removeprefix("/artifacts/")


def get(url: str, **headers: str) -> Any:
    return Client().get(url, headers=headers)


def content(answer: Any) -> bytes:
    return b"".join(answer.streaming_content)


def test_bytes_come_back_under_their_digest(store: LocalStore) -> None:
    assert store.size(DIGEST) is None
    store.write(DIGEST, len(DATA), [DATA[:100], DATA[100:]])
    assert store.size(DIGEST) == len(DATA)
    assert store.read(DIGEST, len(DATA)) == DATA
    store.drop(DIGEST)
    store.drop(DIGEST)
    with pytest.raises(NotFound):
        store.read(DIGEST, len(DATA))


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"!", bytes(len(DATA))], ids=["short", "long", "other"])
def test_bytes_other_than_announced_leave_nothing_behind(store: LocalStore, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        store.write(DIGEST, len(DATA), [data])
    assert store.size(DIGEST) is None
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


def test_bytes_that_rotted_on_the_disk_are_not_handed_out_as_what_they_were(store: LocalStore) -> None:
    store.write(DIGEST, len(DATA), [DATA])
    store.path(DIGEST).write_bytes(b"rot" + DATA[3:])
    with pytest.raises(Conflict, match="another digest"):
        store.read(DIGEST, len(DATA))
    store.path(DIGEST).write_bytes(DATA + DATA)
    with pytest.raises(Conflict, match="more than"):
        store.read(DIGEST, len(DATA))


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", DIGEST.upper(), DIGEST[:-1], DIGEST + "0"])
def test_what_is_no_digest_names_no_file(store: LocalStore, digest: str) -> None:
    with pytest.raises(InvalidInput):
        store.size(digest)


@pytest.mark.parametrize("size", [0, -1, OBJECT_LIMIT_BYTES + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(InvalidInput):
        stores.demand_size(size)


def test_leftovers_of_uploads_that_never_ended_are_removed_and_nothing_else(store: LocalStore) -> None:
    store.write(DIGEST, len(DATA), [DATA])
    part = store.path(DIGEST).with_name(f".{DIGEST}.0000000000000000.part")
    part.write_bytes(b"half")
    assert store.drop_leftovers(part.stat().st_mtime) == 0
    assert store.drop_leftovers(part.stat().st_mtime + 1) == 1
    assert store.size(DIGEST) == len(DATA)


def test_an_address_is_for_one_thing_and_for_a_while(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    url = store.download(DIGEST, len(DATA))
    assert read_ticket(token(url), "get").digest == DIGEST
    with pytest.raises(Forbidden, match="something else"):
        read_ticket(token(url), "put")
    with pytest.raises(Forbidden, match="not signed by us"):
        read_ticket(token(url)[:-1] + "~", "get")
    import time

    later = time.time() + URL_LIFE_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(Forbidden, match="expired"):
        read_ticket(token(url), "get")


def test_an_object_is_sent_whole_or_in_the_range_that_is_asked(store: LocalStore) -> None:
    store.write(DIGEST, len(DATA), [DATA])
    url = store.download(DIGEST, len(DATA), "my file.bin")
    whole = get(url)
    assert (whole.status_code, content(whole)) == (200, DATA)
    assert whole["Content-Disposition"] == 'attachment; filename="my-file.bin"'
    for asked, expected in (("bytes=10-19", DATA[10:20]), ("bytes=2000-", DATA[2000:]), ("bytes=-5", DATA[-5:])):
        part = get(url, Range=asked)
        assert (part.status_code, content(part)) == (206, expected)
        assert int(part["Content-Length"]) == len(expected)
    assert get(url, Range="bytes=9999-").status_code == 416
    assert get(url, Range="nonsense").status_code == 200
    assert content(Client().head(url)) == b""


def test_nobody_reads_or_writes_without_a_good_address(store: LocalStore) -> None:
    store.write(DIGEST, len(DATA), [DATA])
    assert get("/artifacts/nonsense").status_code == 403
    assert Client().put(store.download(DIGEST, len(DATA)), DATA).status_code == 403
    assert Client().delete(store.download(DIGEST, len(DATA))).status_code == 405


@pytest.mark.parametrize(
    ("name", "plain"), [("a b.bin", "a-b.bin"), ('"; rm -rf /', "rm--rf"), ("..", "artifact"), ("ä" * 300, "artifact")]
)
def test_a_filename_is_safe_in_a_header_and_on_any_disk(name: str, plain: str) -> None:
    assert plain_filename(name) == plain
