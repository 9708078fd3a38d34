"""The operators' page of the catalogue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import Client

from marketplace.accounts.models import User
from marketplace.accounts.services import ensure_organisation
from marketplace.catalog import desk, screening
from marketplace.catalog.feeds.local_file import LocalFile
from marketplace.catalog.feeds.vast import VastFeed
from marketplace.catalog.models import Offer
from marketplace.catalog.services import refresh

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 9, 1, 12, tzinfo=UTC)
HEAD = "provider,gpu_name,vram_gib,link,gpus,usd_per_gpu_hour\n"
FAIR = "Fair Barn,H100 SXM,80,SXM,8,2.50\n"


@pytest.fixture
def operator(client: Client, db: None) -> Client:
    user = User.objects.create_user("op@example.org", "correct horse battery", is_staff=True)
    ensure_organisation(user)
    client.force_login(user)
    return client


@pytest.fixture
def absurd(tmp_path: Path) -> LocalFile:
    """One GPU that nobody knows, one that costs nothing, and one that is believable."""
    call_command("load_catalogue")
    path = tmp_path / "list.csv"
    path.write_text(f"{HEAD}Acme,Zeta 9000,,,8,1.00\nAcme,H100 SXM,80,SXM,8,0\n{FAIR}")
    feed = LocalFile(path)
    refresh(feed, NOW)
    return feed


def test_it_is_not_there_for_anybody_but_operators(client: Client) -> None:
    assert client.get("/desk/quarantine").status_code == 302
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    ensure_organisation(user)
    client.force_login(user)
    answer = client.get("/desk/quarantine")
    assert answer.status_code == 404
    assert "/desk" not in client.get("/market").content.decode()


def test_an_operator_finds_the_desk_in_the_rail(operator: Client) -> None:
    assert 'href="/desk/quarantine"' in operator.get("/market").content.decode()
    call_command("make_operator", "op@example.org", no_longer=True)
    assert operator.get("/desk/quarantine").status_code == 404


def test_a_listing_that_is_not_believed_stands_there_with_its_reason_and_nowhere_else(
    operator: Client, absurd: LocalFile
) -> None:
    page = operator.get("/desk/quarantine").content.decode()
    assert "Zeta 9000" in page
    assert "No GPU of ours has this name" in page
    assert "Says it costs nothing" in page
    assert "Fair Barn" not in page
    assert "Zeta 9000" not in operator.get("/market").content.decode()


def test_one_reason_can_be_looked_at_alone_and_one_that_nobody_gives_shows_all(
    operator: Client, absurd: LocalFile
) -> None:
    page = operator.get("/desk/quarantine", {"reason": screening.PRICE_ZERO}).content.decode()
    assert "Zeta 9000" not in page
    assert "Zeta 9000" in operator.get("/desk/quarantine", {"reason": "made up"}).content.decode()


def test_what_a_feed_no_longer_lists_leaves_the_quarantine(absurd: LocalFile) -> None:
    assert desk.quarantined().filter(channel="local-file").count() == 2
    absurd.path.write_text(f"{HEAD}Acme,H100 SXM,80,SXM,8,2.40\n{FAIR}")
    refresh(absurd, NOW + timedelta(minutes=5))
    assert not desk.quarantined().filter(channel="local-file").exists()
    assert Offer.objects.filter(withdrawn_at=None, channel="local-file").count() == 2


def test_the_last_run_of_each_feed_says_how_it_went(operator: Client, absurd: LocalFile) -> None:
    refresh(VastFeed("key", "http://127.0.0.1:1"), NOW)
    refresh(absurd, NOW + timedelta(minutes=5))
    assert [(run.feed, run.outcome) for run in desk.last_runs() if run.feed != "list-prices"] == [
        ("local-file", "done"),
        ("vast", "failed"),
    ]
    assert "ConnectError" in operator.get("/desk/quarantine").content.decode()


def test_every_reason_has_words() -> None:
    reasons = {value for name, value in vars(screening).items() if name.isupper() and isinstance(value, str)}
    assert reasons == set(desk.WORDS)
