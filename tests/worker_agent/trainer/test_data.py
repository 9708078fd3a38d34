"""The text: where it comes from, what is held out, how windows are cut."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from worker_agent.protocol import BlobData, BuiltinData, FilesData, UrlData
from worker_agent.trainer.data import Corpus, load_text, python_stdlib_text
from worker_agent.trainer.errors import BlobMissing, SpecError


def test_the_built_in_text_is_a_mebibyte_of_python_and_english_whatever_the_machine() -> None:
    text = python_stdlib_text(1_000_000)
    assert len(text) == 1_000_000
    assert text.count(b"\ndef ") + text.count(b"    def ") > 500
    assert b"Return" in text
    assert b"\r\n" not in text
    assert python_stdlib_text(1_000_000) == text


def test_the_built_in_text_depends_on_names_and_contents_and_not_on_the_order_of_the_disk(tmp_path: Path) -> None:
    for root in ("one", "two"):
        names = ["b.py", "a.py", "pkg/c.py"] if root == "one" else ["pkg/c.py", "a.py", "b.py"]
        for name in names:
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name}\n")
        (tmp_path / root / "test").mkdir()
        (tmp_path / root / "test" / "skipped.py").write_text(root)
    assert python_stdlib_text(1000, tmp_path / "one") == python_stdlib_text(1000, tmp_path / "two")


def test_no_training_window_touches_a_held_out_byte() -> None:
    corpus = Corpus.split(torch.arange(200, dtype=torch.uint8), heldout_bytes=50, context=16)
    inputs, targets = corpus.batch(np.arange(corpus.windows))
    assert corpus.windows == 9
    assert targets.max() < 150
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert corpus.heldout[0] == 150


def test_each_held_out_byte_but_the_first_is_predicted_at_most_once() -> None:
    corpus = Corpus.split(torch.arange(200, dtype=torch.uint8), heldout_bytes=50, context=16)
    targets = torch.cat([y.flatten() for _, y in corpus.heldout_batches(1000, windows_per_batch=2)])
    assert targets.tolist() == list(range(151, 151 + 48))
    assert sum(y.numel() for _, y in corpus.heldout_batches(32, windows_per_batch=2)) == 32


@pytest.mark.parametrize(("size", "heldout"), [(60, 50), (200, 10)])
def test_a_text_too_small_for_its_split_is_refused(size: int, heldout: int) -> None:
    with pytest.raises(SpecError):
        Corpus.split(torch.zeros(size, dtype=torch.uint8), heldout_bytes=heldout, context=16)


def test_files_folders_and_artifacts_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "b.txt").write_bytes(b"second")
    assert bytes(load_text(FilesData(path=str(tmp_path)), tmp_path).numpy()) == b"first second"
    assert bytes(load_text(FilesData(path=str(tmp_path / "a.txt")), tmp_path).numpy()) == b"first "
    artifact = BlobData(digest="d", size_bytes=6)
    assert bytes(load_text(artifact, tmp_path, tmp_path / "b.txt").numpy()) == b"second"
    with pytest.raises(SpecError):
        load_text(artifact, tmp_path)
    with pytest.raises(SpecError):
        load_text(FilesData(path=str(tmp_path / "absent")), tmp_path)


@pytest.fixture
def web_server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/text" else 404)
            self.end_headers()
            if self.path == "/text":
                self.wfile.write(b"served text")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_url_is_fetched_once_and_proved_by_its_digest(web_server: str, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"served text").hexdigest()
    assert bytes(load_text(UrlData(url=f"{web_server}/text", sha256=digest), tmp_path).numpy()) == b"served text"
    assert bytes(load_text(UrlData(url="http://127.0.0.1:1/", sha256=digest), tmp_path).numpy()) == b"served text"
    with pytest.raises(BlobMissing):
        load_text(UrlData(url=f"{web_server}/text", sha256="0" * 64), tmp_path)
    with pytest.raises(BlobMissing):
        load_text(UrlData(url=f"{web_server}/absent", sha256="1" * 64), tmp_path)


def test_the_built_in_text_is_limited_to_what_was_asked_for(tmp_path: Path) -> None:
    assert load_text(BuiltinData(max_bytes=4096), tmp_path).numel() == 4096
