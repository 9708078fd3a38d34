"""The market as a page, for a visitor who has not signed in."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

pytestmark = pytest.mark.django_db


def test_a_visitor_sees_offers_with_how_old_they_are(client: Client, django_assert_max_num_queries: Any) -> None:
    call_command("load_catalogue")
    with django_assert_max_num_queries(8):
        page = client.get("/market", {"gpu": "H100", "spot": "no"}).content.decode()
    assert "H100 SXM 80 GB" in page
    assert "list price, seen 24 May 2026, not bookable" in page
    assert "RTX 4090 PCIe" not in page
    assert "not shown: GPUs other than H100; spot" in page
    assert "nine tenths below" in page


def test_a_malformed_filter_shows_its_error_and_no_offers(client: Client) -> None:
    call_command("load_catalogue")
    page = client.get("/market", {"min_vram_gib": "much"}).content.decode()
    assert "Enter a whole number" in page
    assert "No offer matches" in page


def test_an_empty_market_says_so(client: Client) -> None:
    assert "No offer matches" in client.get("/market").content.decode()
