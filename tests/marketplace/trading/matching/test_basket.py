"""One bid over several islands: the quorum or nothing, each island with enough, at the least cost."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from marketplace.trading.matching import Ask, Basket, Bid
from marketplace.trading.matching.basket import basket_cover
from tests.marketplace.trading.matching.build import HOUR, ask, bid, usd

PRICES = st.sampled_from([0.6, 1.2, 1.8, 2.4])


@st.composite
def offers(draw: st.DrawFn) -> list[Ask]:
    found = [
        ask(draw(st.integers(1, 3)), 0, 4, draw(PRICES), island=draw(st.sampled_from(["a", "b", "c"])))
        for _ in range(draw(st.integers(1, 6)))
    ]
    return sorted(found, key=lambda each: each.rank)


def best_by_trying(wish: Bid, basket: Basket, asks: list[Ask]) -> tuple[int, int]:
    """(lots, cost) of the largest allowed choice of lots on each island, at the least cost."""
    islands = sorted({each.island for each in asks})
    prices = {
        island: sorted(each.price_uusd_per_gpu_hour for each in asks if each.island == island for _ in range(each.lots))
        for island in islands
    }
    minutes = wish.end_min - wish.start_min
    best = (0, 0)
    for counts in product(*(range(len(prices[island]) + 1) for island in islands)):
        lots = sum(counts)
        if not basket.quorum_lots <= lots <= wish.lots or any(0 < one < basket.min_lots_per_island for one in counts):
            continue
        cost = minutes * sum(sum(prices[island][:one]) for island, one in zip(islands, counts, strict=True))
        if cost <= wish.limit_uusd_per_gpu_hour * minutes * lots and (-lots, cost) < (-best[0], best[1]):
            best = (lots, cost)
    return best


@given(
    asks=offers(),
    lots=st.integers(1, 8),
    quorum=st.integers(1, 8),
    least=st.integers(1, 3),
    limit=PRICES,
)
def test_a_basket_is_the_largest_that_is_allowed_and_the_cheapest_of_its_size(
    asks: list[Ask], lots: int, quorum: int, least: int, limit: float
) -> None:
    wish, basket = bid(lots, 0, 4, limit), Basket(quorum, least)
    takes = basket_cover(wish, asks, basket)
    had = (sum(take.lots for take in takes), sum(take.cost for take in takes))
    assert had == best_by_trying(wish, basket, asks)


def test_below_the_quorum_nothing_is_taken() -> None:
    asks = [ask(2, 0, 4, 1.2, island="a"), ask(2, 0, 4, 1.2, island="b")]
    assert basket_cover(bid(8, 0, 4, 3.0), asks, Basket(quorum_lots=5)) == []
    assert sum(take.lots for take in basket_cover(bid(8, 0, 4, 3.0), asks, Basket(quorum_lots=4))) == 4


def test_a_cheap_island_carries_a_dear_one_to_the_quorum() -> None:
    asks = [ask(3, 0, 4, 0.6, island="a"), ask(1, 0, 4, 3.0, island="b")]
    takes = basket_cover(bid(4, 0, 4, 1.2), asks, Basket(quorum_lots=4))
    assert sum(take.cost for take in takes) == 4 * HOUR * (3 * usd(0.6) + usd(3.0))
    assert basket_cover(bid(4, 0, 4, 1.14), asks, Basket(quorum_lots=4)) == []


def test_an_island_with_too_few_throughout_gives_none() -> None:
    asks = [ask(2, 0, 4, 0.6, island="a"), ask(1, 0, 2, 0.6, island="b"), ask(1, 2, 4, 0.6, island="b")]
    takes = basket_cover(bid(4, 0, 4, 3.0), asks, Basket(quorum_lots=1, min_lots_per_island=2))
    assert {take.ask.island for take in takes} == {"a"}
