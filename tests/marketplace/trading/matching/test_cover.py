"""The cheapest cover of one bid, against every way there is of covering it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.trading.matching import Ask, Bid, Colocation
from marketplace.trading.matching.cover import cover, pieces_of
from marketplace.trading.matching.orders import Take, rest_of, slivers_of
from tests.marketplace.trading.matching.build import HOUR, ask, best_by_trying, bid, usd

HOURS = 6
PRICES = st.sampled_from([1.0, 1.2, 1.5, 1.8, 2.0, 2.4, 3.0])


@st.composite
def asks(draw: st.DrawFn, *, most: int = 5) -> list[Ask]:
    found = []
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, HOURS - 1))
        found.append(ask(draw(st.integers(1, 2)), start, draw(st.integers(start + 1, HOURS)), draw(PRICES)))
    return sorted(found, key=lambda each: each.rank)


@st.composite
def wishes(draw: st.DrawFn) -> Bid:
    start = draw(st.integers(0, HOURS - 1))
    return bid(
        draw(st.integers(1, 3)),
        start,
        draw(st.integers(start + 1, HOURS)),
        draw(PRICES),
        allow_partial_lots=draw(st.booleans()),
        allow_partial_time=draw(st.booleans()),
        min_block_min=draw(st.sampled_from([1, 60, 120, 180])),
    )


def taken(takes: list[Take]) -> tuple[int, int]:
    return sum(take.lot_minutes for take in takes), sum(take.cost for take in takes)


@given(wish=wishes(), offers=asks())
def test_a_cover_takes_as_much_as_can_be_and_pays_as_little_as_can_be(wish: Bid, offers: list[Ask]) -> None:
    if wish.allow_partial_lots and wish.allow_partial_time:
        wish = replace(wish, min_block_min=1)
    assert taken(cover(wish, offers)) == best_by_trying(wish, offers)


@given(wish=wishes(), offers=asks())
def test_with_parts_of_both_and_a_shortest_block_it_takes_no_less_than_with_parts_of_one(
    wish: Bid, offers: list[Ask]
) -> None:
    both = replace(wish, allow_partial_lots=True, allow_partial_time=True)
    size, cost = taken(cover(both, offers))
    assert cost <= wish.limit_uusd_per_gpu_hour * size
    assert size >= best_by_trying(replace(both, allow_partial_lots=False), offers)[0]
    assert size >= best_by_trying(replace(both, allow_partial_time=False), offers)[0]


@given(wish=wishes(), offers=asks(most=8), blocks=st.lists(st.sampled_from([1, 60, 120, 180]), min_size=8, max_size=8))
def test_a_cover_takes_no_more_than_there_is_and_leaves_no_less_than_is_allowed(
    wish: Bid, offers: list[Ask], blocks: list[int]
) -> None:
    offers = [replace(each, min_block_min=block) for each, block in zip(offers, blocks, strict=False)]
    takes = cover(wish, offers)
    size, cost = taken(takes)
    assert cost <= wish.limit_uusd_per_gpu_hour * size
    for minute in range(wish.start_min, wish.end_min, 30):
        there = [take for take in takes if take.start_min <= minute < take.end_min]
        assert sum(take.lots for take in there) <= wish.lots
        used = Counter()
        for take in there:
            used[take.ask.id] += take.lots
        assert all(used[each.id] <= each.lots for each in offers)
    for each in offers:
        mine = [take for take in takes if take.ask is each]
        assert not slivers_of(each, mine)
        left = sum(rest.lots * (rest.end_min - rest.start_min) for rest in rest_of(each, mine))
        assert left + sum(take.lot_minutes for take in mine) == each.lots * (each.end_min - each.start_min)


@given(wish=wishes(), offers=asks())
def test_the_order_in_which_offers_are_given_changes_nothing_but_rank_does(wish: Bid, offers: list[Ask]) -> None:
    assert cover(wish, offers) == cover(wish, list(offers))


def test_cheap_night_hours_carry_a_dear_one() -> None:
    night, day = ask(1, 0, 3, 0.96), ask(1, 3, 4, 3.00)
    assert cover(bid(1, 0, 4, 1.47), [night, day])
    assert cover(bid(1, 0, 4, 1.464), [night, day]) == []


def test_the_same_nodes_are_asks_that_are_there_for_all_of_it() -> None:
    first, second = ask(4, 0, 12, 2.00), ask(4, 8, 20, 1.80)
    wish = bid(4, 6, 14, 1.95)
    assert len(cover(wish, [second, first])) == 2
    assert cover(replace(wish, colocation=Colocation.SAME_NODES), [second, first]) == []
    long = ask(4, 0, 24, 1.95)
    (only,) = cover(replace(wish, colocation=Colocation.SAME_NODES), [second, long, first])
    assert only.ask is long


def test_the_same_island_is_the_one_that_costs_least_in_all() -> None:
    north = [ask(2, 0, 4, 1.00, island="north"), ask(2, 4, 8, 3.00, island="north")]
    south = [ask(2, 0, 8, 1.90, island="south")]
    wish = bid(2, 0, 8, 2.00, colocation=Colocation.SAME_ISLAND)
    offers = sorted([*north, *south], key=lambda each: each.rank)
    assert {take.ask.island for take in cover(wish, offers)} == {"south"}
    anywhere = cover(replace(wish, colocation=Colocation.ANY), offers)
    assert {take.ask.island for take in anywhere} == {"north", "south"}
    assert sum(take.cost for take in anywhere) < 2 * 8 * HOUR * usd(1.90)


def test_a_part_in_time_on_the_same_nodes_is_one_stretch() -> None:
    wish = bid(1, 0, 6, 2.00, colocation=Colocation.SAME_NODES, allow_partial_time=True, min_block_min=60)
    short, long = ask(1, 0, 2, 1.00), ask(1, 3, 6, 1.50)
    (take,) = cover(wish, [short, long])
    assert (take.ask, take.start_min, take.end_min) == (long, 3 * HOUR, 6 * HOUR)


def test_a_block_of_some_hours_lies_where_it_is_cheapest_and_of_equals_earliest() -> None:
    offers = [ask(1, 10, 14, 1.00), ask(1, 20, 24, 1.00), ask(1, 0, 24, 2.00)]
    wish = bid(1, 0, 24, 3.00, duration_min=4 * HOUR)
    (take,) = cover(wish, offers)
    assert (take.start_min, take.end_min) == (10 * HOUR, 14 * HOUR)
    assert cover(replace(wish, duration_min=25 * HOUR), offers) == []


def test_a_rest_that_is_too_short_is_done_without_or_bought_as_well() -> None:
    shy = ask(1, 0, 8.5, 1.00, min_block_min=60)
    dear = ask(1, 0, 8, 1.10)
    wish = bid(1, 0, 8, 1.20)
    assert [take.ask for take in cover(wish, [shy, dear])] == [dear]
    (take,) = cover(replace(wish, pays_slivers=True), [shy, dear])
    assert (take.ask, take.end_min) == (shy, int(8.5 * HOUR))
    poor = replace(wish, pays_slivers=True, limit_uusd_per_gpu_hour=usd(1.05))
    assert cover(poor, [shy]) == []


def test_a_gap_between_two_pieces_of_one_ask_is_a_rest_too() -> None:
    whole = ask(1, 0, 6, 1.50, min_block_min=120)
    night = ask(1, 2, 3, 1.00)
    wish = bid(1, 0, 6, 1.50)
    assert [take.ask for take in cover(wish, [night, whole])] == []
    assert len(cover(wish, [night, replace(whole, min_block_min=60)])) == 3


@pytest.mark.parametrize(
    ("steps", "pieces"),
    [
        ([(0, 1, 2), (1, 2, 1)], [(1, 0, 2), (1, 0, 1)]),
        ([(0, 1, 1), (2, 3, 1)], [(1, 0, 1), (1, 2, 3)]),
        ([(0, 1, 1), (1, 2, 3), (2, 3, 1)], [(1, 0, 3), (2, 1, 2)]),
    ],
)
def test_steps_are_cut_into_the_longest_pieces(
    steps: list[tuple[int, int, int]], pieces: list[tuple[int, int, int]]
) -> None:
    assert sorted(pieces_of(steps)) == sorted(pieces)
