"""What pages write for money, time, counts and states."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.template import engines

from marketplace.core.templatetags import words


def render(source: str, **context: object) -> str:
    return engines["django"].from_string(source).render(context)


def test_money_shows_what_can_be_paid_and_all_of_it_on_hover() -> None:
    shown = render("{{ amount|usd }}", amount=1_204_183_456)
    assert shown == '<span class="usd" title="$1,204.183456">$1,204.18</span>'
    assert '>$2.15</span> <span class="unit">/GPU-h</span>' in render("{{ amount|price }}", amount=2_150_000)


@pytest.mark.parametrize("name", ["usd", "price", "utc", "ago", "count", "size", "gpu_time", "stated"])
def test_what_is_not_stated_is_said_in_words(name: str) -> None:
    assert render("{{ value|" + name + " }}", value=None) == "not stated"


def test_zero_is_a_value() -> None:
    assert "$0.00" in render("{{ value|usd }}", value=0)
    assert render("{{ value|count }} {{ value|size }} {{ value|gpu_time }} {{ value|stated }}", value=0) == (
        "0 0 B 0 GPU-s 0"
    )


def test_time_is_absolute_with_its_zone_and_relative_beside_it() -> None:
    shown = render("{{ at|utc }}", at=datetime(2026, 12, 1, 6, 12, tzinfo=UTC))
    assert ">1 Dec 2026 06:12 UTC</time>" in shown
    assert 'datetime="2026-12-01T06:12:00+00:00"' in shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "just now"), (-42, "42 s ago"), (-200, "3 min ago"), (7_300, "in 2 h"), (-180_000, "2 d ago")],
)
def test_distances_are_said_in_one_unit(seconds: int, said: str) -> None:
    assert words.distance(timedelta(seconds=seconds)) == said


@pytest.mark.parametrize(
    ("number", "said"), [(999, "999"), (1_000, "1 k"), (1_500_000, "1.5 M"), (7_000_000_000, "7 B")]
)
def test_counts_have_three_digits(number: int, said: str) -> None:
    assert words.count(number) == said


def test_sizes_and_gpu_time_choose_their_unit() -> None:
    assert (words.size(1_930_000), words.size(512)) == ("1.93 MB", "512 B")
    assert (words.gpu_time(42_400), words.gpu_time(600_000)) == ("42 GPU-s", "10.0 GPU-min")
    assert words.gpu_time(3_600_000 * 1_500) == "1,500.0 GPU-h"


def test_a_state_is_a_word_and_what_it_says_is_escaped() -> None:
    assert render('{% state "lost" "Lost" %}') == '<span class="badge bad">Lost</span>'
    assert "&lt;b&gt;" in render("{% state value %}", value="<b>")


def test_a_brief_time_says_the_day_only_where_it_is_not_today() -> None:
    now = datetime.now(UTC)
    shown = render('{{ at|utc:"brief" }}', at=now)
    assert f">{now:%H:%M:%S} UTC</time>" in shown
    assert f"{now:%b %Y}, just now" in shown
    long_ago = render('{{ at|utc:"brief" }}', at=datetime(2025, 11, 30, 6, 12, 9, tzinfo=UTC))
    assert ">30 Nov 06:12 UTC</time>" in long_ago
    assert 'title="30 Nov 2025, ' in long_ago


@pytest.mark.parametrize(
    ("amount_uusd", "shown"),
    [(0, "$0.00"), (1, "&lt;$0.01"), (9_999, "&lt;$0.01"), (10_000, "$0.01"), (-40_000, "-$0.04")],
)
def test_little_money_is_never_written_as_none(amount_uusd: int, shown: str) -> None:
    assert f">{shown}</span>" in render("{{ amount|usd }}", amount=amount_uusd)
