"""The aggregator's adapter against a server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from marketplace.catalog.feeds import FeedError
from marketplace.catalog.feeds.prime import PrimeFeed

NOW = datetime(2026, 6, 1, tzinfo=UTC)
ITEMS = json.loads(Path(__file__).with_name("fixtures").joinpath("prime_availability.json").read_text())["items"]
PAGE = 2


class Aggregator(BaseHTTPRequestHandler):
    """Gives pages of two to whoever has the key."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer right":
            self.send_error(401)
            return
        page = int(parse_qs(urlsplit(self.path).query)["page"][0])
        body = json.dumps({"items": ITEMS[(page - 1) * PAGE : page * PAGE], "totalCount": len(ITEMS)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests read answers, not logs."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Aggregator) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_page_is_read_once(address: str) -> None:
    found = PrimeFeed("right", address).fetch(NOW)
    assert [listing.gpus for listing in found] == [item["gpuCount"] for item in ITEMS]
    assert found[0].price == "1.6567999999999998"


def test_a_refused_key_is_an_error_that_does_not_repeat_the_key(address: str) -> None:
    with pytest.raises(FeedError) as caught:
        PrimeFeed("wrong-secret", address).fetch(NOW)
    assert "wrong-secret" not in str(caught.value)
