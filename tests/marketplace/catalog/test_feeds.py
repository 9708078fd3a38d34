"""Every feed against an answer of its source's shape: what a number there means, and what it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from marketplace.catalog.feeds import Feed, FeedError, RawListing, hyperstack, lambda_cloud, runpod, shadeform, vast
from marketplace.catalog.feeds.configured import configured_feeds
from marketplace.catalog.feeds.hunted import HuntedFeed, listings_of
from marketplace.catalog.feeds.hyperstack import HyperstackFeed
from marketplace.catalog.feeds.lambda_cloud import LambdaFeed
from marketplace.catalog.feeds.local_file import LocalFile
from marketplace.catalog.feeds.runpod import RunpodFeed
from marketplace.catalog.feeds.shadeform import ShadeformFeed
from marketplace.catalog.feeds.vast import VastFeed
from marketplace.catalog.models import Offer
from marketplace.catalog.services import load_gpus, refresh

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
FIXTURES = Path(__file__).with_name("fixtures")
KEY = "sk-right"


def recorded(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


# What each address of a source answers to whom it knows, by the header that carries the key.
ANSWERS = {
    "/api/v0/bundles/": ("vast_bundles.json", "Authorization", f"Bearer {KEY}"),
    "/api/v1/instance-types": ("lambda_instance_types.json", "Authorization", f"Bearer {KEY}"),
    "/v1/instances/types": ("shadeform_types.json", "X-API-KEY", KEY),
    "/graphql": ("runpod_gpu_types.json", "Authorization", f"Bearer {KEY}"),
    "/v1/core/stocks": ("hyperstack_stocks.json", "api_key", KEY),
    "/v1/pricebook": ("hyperstack_pricebook.json", "api_key", KEY),
}
FEEDS: tuple[Callable[[str, str], Feed], ...] = (VastFeed, LambdaFeed, ShadeformFeed, RunpodFeed, HyperstackFeed)


class Sources(BaseHTTPRequestHandler):
    """All sources at one address: each path is one source's alone."""

    def do_GET(self) -> None:
        name, header, value = ANSWERS[urlsplit(self.path).path]
        if self.headers.get(header) != value:
            self.send_error(401)
            return
        body = recorded(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if b"gpuTypes" not in asked:
            self.send_error(400)
            return
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Tests read answers, not logs."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sources) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def stored(feed: Feed) -> list[Offer]:
    load_gpus()
    refresh(feed, NOW)
    return list(Offer.objects.filter(withdrawn_at=None).order_by("upstream_sku", "region_raw", "gpus_per_node", "tier"))


@pytest.mark.parametrize("feed", FEEDS)
def test_a_feed_asks_as_its_source_wants_to_be_asked(feed: Callable[[str, str], Feed], address: str) -> None:
    found = feed(KEY, address).fetch(NOW)
    assert found
    assert {listing.channel for listing in found} == {feed(KEY, address).channels[0].slug}


@pytest.mark.parametrize("feed", FEEDS)
def test_a_refused_key_is_an_error_that_does_not_repeat_it(feed: Callable[[str, str], Feed], address: str) -> None:
    with pytest.raises(FeedError, match="answered 401") as caught:
        feed("wrong-secret", address).fetch(NOW)
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "parse",
    [
        vast.parse,
        lambda_cloud.parse,
        shadeform.parse,
        runpod.parse,
        lambda body, now: hyperstack.parse(body, b"[]", now),
    ],
)
@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"offers": [{}], "data": {"a": {}}, "stocks": [1]}'])
def test_an_answer_of_another_shape_is_an_error_and_no_half_list(
    parse: Callable[[bytes, datetime], list[RawListing]], body: bytes
) -> None:
    with pytest.raises(FeedError, match=r"not JSON|not the expected shape"):
        parse(body, NOW)


def test_a_source_that_is_not_there_is_an_error_by_its_kind() -> None:
    with pytest.raises(FeedError, match="ConnectError"):
        VastFeed(KEY, "http://127.0.0.1:1").fetch(NOW)


@pytest.mark.django_db
def test_slices_of_one_machine_are_one_group_at_one_price_per_gpu(address: str) -> None:
    one, four, *_ = stored(VastFeed(KEY, address))
    assert (one.gpus_per_node, four.gpus_per_node) == (1, 4)
    assert one.dedupe_group == four.dedupe_group
    assert one.price_uusd_per_gpu_hour == four.price_uusd_per_gpu_hour == 402_000
    assert one.gpu_id == "rtx4090-pcie-24g"
    assert one.ram_mib == 64_214
    assert one.country == "CA"


@pytest.mark.django_db
def test_a_modified_card_is_not_the_card_it_is_called(address: str) -> None:
    modified = next(each for each in stored(VastFeed(KEY, address)) if each.upstream_sku == "machine-8")
    assert modified.gpu_id == "rtx4090-pcie-48g"
    assert modified.gpu_name_raw == "RTX 4090"
    assert modified.country == ""


@pytest.mark.django_db
def test_a_bid_floor_is_no_price_and_what_is_taken_is_not_listed(address: str) -> None:
    offers = stored(VastFeed(KEY, address))
    floor = next(each for each in offers if each.upstream_sku == "machine-9")
    assert floor.price_uusd_per_gpu_hour is None
    assert floor.pricing_model == "spot_bid"
    assert floor.preemptible is True
    assert not [each for each in offers if each.upstream_sku == "machine-10"]


@pytest.mark.django_db
def test_cents_for_eight_become_micro_dollars_for_one_and_each_region_is_an_offer(address: str) -> None:
    offers = stored(LambdaFeed(KEY, address))
    eight = [each for each in offers if each.gpus_per_node == 8]
    assert [each.region_raw for each in eight] == ["us-east-3", "us-west-3"]
    assert {each.price_uusd_per_gpu_hour for each in eight} == {2_990_000}
    assert {each.gpu_id for each in eight} == {"h100-sxm-80g"}
    assert {each.ram_mib for each in eight} == {1800 * 1024}


@pytest.mark.django_db
def test_a_type_without_capacity_is_listed_and_not_there(address: str) -> None:
    offers = {each.upstream_sku: each for each in stored(LambdaFeed(KEY, address))}
    assert offers["gpu_1x_a10"].stock_lower_bound == 0
    assert offers["gpu_1x_a10"].price_uusd_per_gpu_hour == 750_000
    assert offers["gpu_1x_gh200"].price_uusd_per_gpu_hour is None


@pytest.mark.django_db
def test_whose_machine_it_is_stands_apart_from_the_door_it_is_sold_by(address: str) -> None:
    offers = stored(ShadeformFeed(KEY, address))
    there, away = (each for each in offers if each.upstream == "cloud-three")
    assert (there.region_raw, there.stock_lower_bound) == ("canada-1", 1)
    assert (away.region_raw, away.stock_lower_bound) == ("norway-1", 0)
    assert there.price_uusd_per_gpu_hour == 2_100_000
    assert there.gpu_id == "h100-pcie-80g"


@pytest.mark.django_db
def test_a_gpu_of_unstated_form_is_of_unknown_form_instead_of_guessed(address: str) -> None:
    offers = {each.upstream_sku: each for each in stored(ShadeformFeed(KEY, address))}
    assert offers["cloud-four/hgx-8"].gpu_id == "h100-sxm-80g"
    assert offers["cloud-four/hgx-8"].price_uusd_per_gpu_hour == 2_498_750
    assert offers["cloud-four/mystery"].gpu_id == "h100-unknown-80g"


@pytest.mark.django_db
def test_a_price_for_one_gpu_is_not_divided_and_none_or_zero_is_no_offer(address: str) -> None:
    offers = stored(RunpodFeed(KEY, address))
    assert {(each.gpu_name_raw, each.tier, each.pricing_model, each.price_uusd_per_gpu_hour) for each in offers} == {
        ("NVIDIA GeForce RTX 4090", "secure", "on_demand", 690_000),
        ("NVIDIA H100 PCIe", "community", "on_demand", 1_990_000),
        ("NVIDIA H100 PCIe", "secure", "on_demand", 2_390_000),
        ("NVIDIA H100 PCIe", "secure", "spot_fixed", 1_250_000),
    }
    assert {each.gpu_name_raw: each.stock_lower_bound for each in offers} == {
        "NVIDIA GeForce RTX 4090": None,
        "NVIDIA H100 PCIe": 1,
    }


@pytest.mark.django_db
def test_a_count_with_a_plus_is_a_lower_bound_and_prices_come_from_the_book(address: str) -> None:
    offers = {(each.upstream_sku, each.region_raw): each for each in stored(HyperstackFeed(KEY, address))}
    many = offers["H100-80G-PCIe", "NORWAY-1"]
    assert (many.stock_lower_bound, many.price_uusd_per_gpu_hour, many.gpu_id) == (200, 1_900_000, "h100-pcie-80g")
    assert offers["A100-80G-PCIe", "NORWAY-1"].stock_lower_bound == 0
    unpriced = offers["L40", "CANADA-1"]
    assert (unpriced.stock_lower_bound, unpriced.price_uusd_per_gpu_hour) == (3, None)


@pytest.mark.django_db
def test_an_own_list_says_who_may_resell_and_keeps_its_dates() -> None:
    offers = stored(LocalFile(FIXTURES / "own_list.csv"))
    reserved, spot = sorted((each for each in offers if each.upstream == "north-barn"), key=lambda o: o.pricing_model)
    assert (reserved.resale_allowed, spot.resale_allowed) == ("yes", "no")
    assert (reserved.price_uusd_per_gpu_hour, spot.price_uusd_per_gpu_hour) == (1_850_000, 1_200_000)
    assert reserved.observed_at == spot.observed_at == datetime(2026, 6, 1, 10, tzinfo=UTC)
    friend = next(each for each in offers if each.upstream == "a-friend")
    assert (friend.price_uusd_per_gpu_hour, friend.pricing_model, friend.resale_allowed) == (
        None,
        "quote_only",
        "unknown",
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (",H100,8,2", "line 3: provider is missing"),
        ("barn,H100,eight,2", "line 3: invalid literal"),
        ("barn,H100,0,2", "line 3: gpus must be at least 1"),
        ("barn,H100,8", "line 3: usd_per_gpu_hour is missing"),
        ("barn,H100,8,2,spot,,more", "line 3: more cells than the header has"),
        ("barn,H100,8,2,sometimes", "line 3: pricing or resale_allowed"),
        ("barn,H100,8,2,spot,yesterday", "line 3: Invalid isoformat"),
    ],
)
def test_an_own_list_with_a_bad_line_is_refused_whole_by_the_lines_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"provider,gpu_name,gpus,usd_per_gpu_hour,pricing,seen_at\nbarn,H100,8,2\n{line}\n", "utf-8")
    with pytest.raises(FeedError, match=says):
        LocalFile(path).fetch(NOW)


def test_an_own_list_that_is_not_there_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="FileNotFoundError"):
        LocalFile(tmp_path / "missing.csv").fetch(NOW)
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(FeedError, match="UnicodeDecodeError"):
        LocalFile(tmp_path / "picture.csv").fetch(NOW)


def hunted_item(**changes: object) -> SimpleNamespace:
    item = {
        "provider": "cloud-five",
        "instance_name": "p5.48xlarge",
        "location": "us-east-1",
        "price": 98.32,
        "cpu": 192,
        "memory": 2048.0,
        "gpu_count": 8,
        "gpu_name": "H100",
        "gpu_memory": 80.0,
        "spot": False,
    }
    return SimpleNamespace(**{**item, **changes})


def test_a_hunted_float_goes_no_further_than_its_shortest_text() -> None:
    (found,) = listings_of([hunted_item()], NOW)
    assert (found.price, found.price_basis, found.gpus, found.vram_gib) == ("98.32", "per_instance", 8, Decimal(80))
    assert (found.ram_mib, found.vcpus, found.region) == (2048 * 1024, 192, "us-east-1")


def test_a_hunted_machine_without_gpus_is_left_out_and_a_spot_one_may_go_away() -> None:
    (found,) = listings_of([hunted_item(gpu_count=0, gpu_name=None), hunted_item(spot=True)], NOW)
    assert (found.pricing_model, found.preemptible) == ("spot_fixed", True)


def test_hunting_without_the_package_says_so() -> None:
    with pytest.raises(FeedError, match="gpuhunt is not installed here"):
        HuntedFeed().fetch(NOW)


def test_an_installation_reads_what_it_has_a_key_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PRIME", "SHADEFORM", "VAST", "LAMBDA", "RUNPOD", "HYPERSTACK"):
        monkeypatch.delenv(f"{name}_API_KEY", raising=False)
    assert configured_feeds() == []
    monkeypatch.setenv("VAST_API_KEY", "key")
    monkeypatch.setenv("VAST_API_BASE", "http://127.0.0.1:9")
    monkeypatch.setenv("GPUHUNT", "1")
    monkeypatch.setenv("CATALOGUE_FILE", str(tmp_path / "own.csv"))
    found = configured_feeds()
    assert [feed.name for feed in found] == ["vast", "gpuhunt", "local-file"]
    assert isinstance(found[0], VastFeed)
    assert found[0].base_url == "http://127.0.0.1:9"


@pytest.mark.django_db
def test_a_machine_without_gpus_and_a_word_too_long_cost_no_refresh() -> None:
    load_gpus()
    first, *rest = vast.parse(recorded("vast_bundles.json"), NOW)
    long_word = "x" * 5000
    listings = [
        RawListing(**{**vars(first), "gpus": 0}),
        RawListing(**{**vars(rest[0]), "region": long_word, "gpu_name": long_word, "tier": long_word}),
    ]
    feed = SimpleNamespace(name="vast", channels=VastFeed.channels, fetch=lambda now: listings)
    refresh(feed, NOW)
    offer = Offer.objects.get()
    assert long_word.startswith(offer.region_raw)
    assert offer.region_raw
