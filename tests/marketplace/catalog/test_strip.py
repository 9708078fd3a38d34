"""The price strip: quantiles that somebody really asks, in a picture that holds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marketplace.catalog.strip import WIDTH, quantile, strip_of


def test_too_few_prices_make_no_picture() -> None:
    assert strip_of([1, 2]) is None


def test_quantiles_are_nearest_ranks() -> None:
    prices = list(range(1, 11))
    assert [quantile(prices, share) for share in (0.1, 0.5, 0.9)] == [1, 5, 9]


@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=60))
def test_every_quantile_is_a_price_asked_and_lies_in_the_picture(prices: list[int]) -> None:
    strip = strip_of(prices)
    assert strip is not None
    assert {strip.p10_uusd, strip.median_uusd, strip.p90_uusd} <= set(prices)
    assert strip.low_uusd <= strip.p10_uusd <= strip.median_uusd <= strip.p90_uusd <= strip.high_uusd
    assert all(0 <= x <= WIDTH for x in (*strip.ticks, strip.p10_x, strip.median_x, strip.p90_x))
    assert len(strip.ticks) == strip.count == len(prices)
