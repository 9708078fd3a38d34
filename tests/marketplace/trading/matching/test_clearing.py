"""A batch of the market: who trades with whom, at the resting order's price, and what is left standing."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.trading.matching import Ask, Basket, Bid, Book, Cancel, Colocation, Outcome, Tif, match
from marketplace.trading.matching.orders import value_uusd
from tests.marketplace.trading.matching.build import HOUR, ask, bid, shown, usd

HOURS = 6
PRICES = st.sampled_from([0.6, 1.2, 1.8, 2.4, 3.0])


def cleared(*orders: Ask | Bid, now_h: float = 0, new_from: int = 0) -> Outcome:
    asks = tuple(each for each in orders if isinstance(each, Ask))
    bids = tuple(each for each in orders if isinstance(each, Bid))
    return match(Book(asks, bids, new_from), int(now_h * HOUR))


@st.composite
def books(draw: st.DrawFn) -> Book:
    accounts = st.sampled_from(["ada", "bob", "cem", "dot"])
    asks, bids = [], []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, HOURS - 1))
        terms: dict[str, Any] = {
            "account": draw(accounts),
            "sku": draw(st.sampled_from(["x", "y"])),
            "min_block_min": draw(st.sampled_from([1, 60, 120])),
            "all_or_none": draw(st.sampled_from([False, False, False, True])),
            "post_only": draw(st.sampled_from([False, False, True])),
            "expires_min": draw(st.sampled_from([None, None, 30, 600])),
        }
        terms["island"] = terms["sku"]
        asks.append(ask(draw(st.integers(1, 3)), start, draw(st.integers(start + 1, HOURS)), draw(PRICES), **terms))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, HOURS - 1))
        length = draw(st.integers(1, HOURS - start))
        terms = {
            "account": draw(accounts),
            "skus": draw(st.sampled_from([None, frozenset({"x"}), frozenset({"y"})])),
            "tif": draw(st.sampled_from(list(Tif))),
            "allow_partial_lots": draw(st.booleans()),
            "allow_partial_time": draw(st.booleans()),
            "min_block_min": draw(st.sampled_from([1, 60, 120])),
            "colocation": draw(st.sampled_from(list(Colocation))),
            "pays_slivers": draw(st.booleans()),
            "post_only": draw(st.sampled_from([False, False, True])),
            "basket": draw(st.sampled_from([None, None, Basket(2), Basket(1, 2)])),
            "duration_min": draw(st.sampled_from([None, None, 60, 120])),
        }
        if terms["basket"] is not None:
            terms["duration_min"] = None
        if terms["duration_min"] is not None:
            terms["pays_slivers"] = False
        bids.append(bid(draw(st.integers(1, 3)), start, start + length, draw(PRICES), **terms))
    orders = [*asks, *bids]
    sequence = draw(st.permutations(range(1, len(orders) + 1)))
    dated = [replace(each, accepted=number) for each, number in zip(orders, sequence, strict=True)]
    new_from = draw(st.integers(0, len(orders) + 1))
    return Book(tuple(dated[: len(asks)]), tuple(dated[len(asks) :]), new_from)  # type: ignore[arg-type]


NOW = st.integers(0, 3).map(lambda hours: hours * HOUR)


@given(book=books(), now_min=NOW)
def test_lots_are_neither_made_nor_lost(book: Book, now_min: int) -> None:
    done = match(book, now_min)
    gone = {cancel.order_id for cancel in done.cancels}
    for each in book.asks:
        if each.id in gone or each.all_or_none:
            continue
        for minute in range(max(now_min, each.start_min), each.end_min, 30):
            sold = sum(f.lots for f in done.fills if f.ask_id == each.id and f.start_min <= minute < f.end_min)
            left = sum(a.lots for a in done.asks if a.id == each.id and a.start_min <= minute < a.end_min)
            assert sold + left == each.lots
    assert all(fill.start_min >= now_min for fill in done.fills)


@given(book=books(), now_min=NOW)
def test_nobody_pays_above_their_limit_or_gets_less_than_they_ask_or_trades_with_themselves(
    book: Book, now_min: int
) -> None:
    done = match(book, now_min)
    asks, bids = {each.id: each for each in book.asks}, {each.id: each for each in book.bids}
    paid: dict[str, int] = defaultdict(int)
    wanted: dict[str, int] = defaultdict(int)
    for fill in done.fills:
        wish, offer = bids[fill.bid_id], asks[fill.ask_id]
        assert fill.buyer != fill.seller
        assert wish.skus is None or fill.sku in wish.skus
        paid[wish.id] += fill.value_uusd
        inside = min(fill.end_min, wish.end_min) - max(fill.start_min, wish.start_min)
        wanted[wish.id] += fill.lots * inside
        if fill.price_uusd_per_gpu_hour is not None:
            assert fill.price_uusd_per_gpu_hour >= offer.price_uusd_per_gpu_hour
            assert fill.price_uusd_per_gpu_hour % 60 == 0
            if offer.accepted < wish.accepted:
                assert fill.price_uusd_per_gpu_hour == offer.price_uusd_per_gpu_hour
    for key, value in paid.items():
        assert value <= value_uusd(bids[key].limit_uusd_per_gpu_hour, wanted[key])
    for offer in asks.values():
        mine = [fill for fill in done.fills if fill.ask_id == offer.id]
        if offer.all_or_none and mine:
            area = offer.lots * (offer.end_min - offer.start_min)
            assert sum(fill.value_uusd for fill in mine) == value_uusd(offer.price_uusd_per_gpu_hour, area)


@given(book=books(), now_min=NOW)
def test_what_stands_after_a_batch_holds_no_further_trade(book: Book, now_min: int) -> None:
    done = match(book, now_min)
    again = match(Book(done.asks, done.bids, new_from=10**9), now_min)
    assert again.fills == ()
    assert set(again.asks) == set(done.asks)


@given(book=books(), now_min=NOW, seed=st.integers())
def test_the_same_book_in_any_order_has_the_same_outcome(book: Book, now_min: int, seed: int) -> None:
    shuffled = random.Random(seed)
    asks, bids = list(book.asks), list(book.bids)
    shuffled.shuffle(asks)
    shuffled.shuffle(bids)
    one, other = match(book, now_min), match(Book(tuple(asks), tuple(bids), book.new_from), now_min)
    assert (one.fills, one.asks, one.bids) == (other.fills, other.asks, other.bids)
    assert sorted(map(str, one.cancels)) == sorted(map(str, other.cancels))


@given(book=books(), now_min=NOW)
def test_an_order_that_wants_all_or_now_never_stands_and_all_means_all(book: Book, now_min: int) -> None:
    done = match(book, now_min)
    assert all(each.tif is Tif.GTC for each in done.bids)
    for wish in book.bids:
        mine = [fill for fill in done.fills if fill.bid_id == wish.id and fill.price_uusd_per_gpu_hour is not None]
        if wish.tif is Tif.FOK and mine:
            asked = wish.lots * (wish.duration_min or wish.end_min - wish.start_min)
            had = sum(f.lots * (min(f.end_min, wish.end_min) - max(f.start_min, wish.start_min)) for f in mine)
            assert had == asked


def test_the_worked_example_fills_across_windows_and_not_on_the_same_nodes() -> None:
    a = ask(4, 0, 12, 2.00 - 0.00002, id="a")
    b = ask(4, 8, 20, 1.80, id="b")
    a, b = replace(a, price_uusd_per_gpu_hour=1_999_980), replace(b, price_uusd_per_gpu_hour=1_800_000)
    wish = replace(bid(4, 6, 14, 1.95), limit_uusd_per_gpu_hour=1_950_000)
    done = cleared(a, b, wish)
    assert shown(done.fills) == [("a", 4, 6, 8, 2.0), ("b", 4, 8, 14, 1.8)]
    average = sum(fill.value_uusd for fill in done.fills) * 60 / sum(fill.lot_minutes for fill in done.fills)
    assert average == pytest.approx(1_850_000, rel=1e-5)
    assert cleared(a, b, replace(wish, colocation=Colocation.SAME_NODES)).fills == ()


def test_the_price_is_the_resting_orders() -> None:
    resting = ask(1, 0, 4, 1.2)
    late = bid(1, 0, 4, 1.8)
    assert shown(cleared(resting, late).fills)[0][4] == 1.2
    resting_bid = bid(1, 0, 4, 1.8)
    late_ask = ask(1, 0, 4, 1.2)
    assert shown(cleared(resting_bid, late_ask).fills)[0][4] == 1.8


def test_what_a_resting_bid_gives_a_new_ask_leaves_its_dear_hours_paid() -> None:
    dear = ask(1, 0, 2, 3.0, id="dear")
    wish = bid(1, 0, 4, 2.4)
    new = ask(1, 2, 4, 1.2, id="new")
    done = cleared(dear, wish, new)
    assert shown(done.fills) == [("dear", 1, 0, 2, 3.0), ("new", 1, 2, 4, 1.8)]
    assert sum(fill.value_uusd for fill in done.fills) == value_uusd(usd(2.4), 4 * HOUR)


def test_who_bids_more_is_served_first_and_then_who_came_first() -> None:
    only = ask(1, 0, 4, 1.2)
    early, late, dear = bid(1, 0, 4, 1.8, id="early"), bid(1, 0, 4, 1.8, id="late"), bid(1, 0, 4, 2.4, id="dear")
    assert [fill.bid_id for fill in cleared(only, early, late, dear).fills] == ["dear"]
    assert [fill.bid_id for fill in cleared(only, late, early).fills] == ["early"]


def test_nobody_trades_with_themselves_even_where_they_are_the_cheapest() -> None:
    mine, other = ask(1, 0, 4, 0.6, account="ada"), ask(1, 0, 4, 1.2)
    done = cleared(mine, other, bid(1, 0, 4, 1.8, account="ada"))
    assert [fill.ask_id for fill in done.fills] == [other.id]
    assert mine.id in [each.id for each in done.asks]


def test_what_a_part_filled_bid_still_wants_stands_and_is_filled_later() -> None:
    wish = bid(3, 0, 4, 1.8, allow_partial_lots=True)
    first = cleared(ask(1, 0, 4, 1.2), wish)
    assert [(each.id, each.lots, each.part) for each in first.bids] == [(wish.id, 2, 1)]
    then = match(Book((*first.asks, ask(5, 0, 4, 1.2)), first.bids), 0)
    assert [(fill.bid_id, fill.lots) for fill in then.fills] == [(wish.id, 2)]
    assert then.bids == ()


def test_an_immediate_bid_takes_what_there_is_and_the_rest_is_cancelled() -> None:
    wish = bid(3, 0, 4, 1.8, allow_partial_lots=True, tif=Tif.IOC)
    done = cleared(ask(1, 0, 4, 1.2), wish)
    assert len(done.fills) == 1
    assert done.cancels == (Cancel(wish.id, "rest"),)
    assert cleared(wish).cancels == (Cancel(wish.id, "unfilled"),)
    assert cleared(ask(1, 0, 4, 1.2), replace(wish, tif=Tif.FOK)).fills == ()


def test_an_order_that_would_only_rest_is_cancelled_where_it_would_take() -> None:
    offer, wish = ask(1, 0, 4, 1.2), bid(1, 0, 4, 1.8, post_only=True)
    done = cleared(offer, wish)
    assert (done.fills, done.cancels) == ((), (Cancel(wish.id, "would_take"),))
    standing, new = bid(1, 0, 4, 1.8), ask(1, 0, 4, 1.2, post_only=True)
    done = cleared(standing, new)
    assert (done.fills, done.cancels) == ((), (Cancel(new.id, "would_take"),))
    assert cleared(standing, new, new_from=new.accepted + 1).fills


def test_minutes_that_have_passed_are_sold_to_nobody() -> None:
    offer = ask(1, 0, 4, 1.2)
    done = cleared(offer, now_h=1)
    assert [(each.start_min, each.end_min) for each in done.asks] == [(HOUR, 4 * HOUR)]
    late = bid(1, 0, 4, 1.8)
    assert cleared(offer, late, now_h=1).cancels == (Cancel(late.id, "begun"),)
    moving = bid(1, 0, 4, 1.8, duration_min=2 * HOUR)
    assert shown(cleared(offer, moving, now_h=1).fills)[0][2:4] == (1, 3)
    assert cleared(offer, now_h=5).cancels == (Cancel(offer.id, "begun"),)
    short = ask(1, 0, 4, 1.2, expires_min=30)
    assert cleared(short, now_h=1).cancels == (Cancel(short.id, "expired"),)


def test_an_ask_that_is_sold_whole_waits_for_bids_that_fill_it() -> None:
    offer = ask(2, 0, 4, 1.2, all_or_none=True)
    one = bid(2, 0, 2, 1.8)
    assert cleared(offer, one).fills == ()
    two = bid(2, 2, 4, 1.2)
    done = cleared(offer, one, two)
    assert sum(fill.value_uusd for fill in done.fills) == value_uusd(usd(1.2), 8 * HOUR)
    assert done.asks == ()
    assert done.bids == ()


def test_asks_of_one_price_are_taken_in_the_order_they_came() -> None:
    asks = [ask(1, 0, 4, 1.2) for _ in range(300)]
    done = cleared(*asks, bid(200, 0, 4, 1.2))
    assert sorted(fill.ask_id for fill in done.fills) == sorted(each.id for each in asks[:200])


def test_a_basket_has_no_block_and_a_block_buys_no_sliver() -> None:
    with pytest.raises(ValueError, match="no block"):
        bid(1, 0, 4, 1.2, basket=Basket(1), duration_min=60)
    with pytest.raises(ValueError, match="leaves no sliver"):
        bid(1, 0, 4, 1.2, duration_min=60, pays_slivers=True)


def test_what_a_resting_bid_gives_a_new_ask_leaves_its_sliver_paid() -> None:
    wish = bid(1, 0, 1, 1.2, pays_slivers=True)
    new = ask(1, 0, 1.5, 0.6, min_block_min=60)
    (fill,) = cleared(wish, new).fills
    assert (fill.end_min, fill.value_uusd) == (90, value_uusd(usd(0.8), 90))


def test_slivers_do_not_make_a_part_into_all_of_it() -> None:
    two, wish = ask(2, 0, 2, 0.6, min_block_min=120), bid(3, 1, 2, 1.2, allow_partial_lots=True, pays_slivers=True)
    assert cleared(two, replace(wish, tif=Tif.FOK)).fills == ()
    assert cleared(two, wish).fills


def test_the_rest_of_a_bid_for_one_island_is_of_the_same_island() -> None:
    here, there = ask(1, 0, 2, 0.6, sku="x", island="x"), ask(1, 0, 2, 1.2, sku="y", island="y")
    wish = bid(2, 0, 2, 1.2, allow_partial_lots=True, colocation=Colocation.SAME_ISLAND)
    (rest,) = cleared(here, there, wish).bids
    assert (rest.lots, rest.skus) == (1, frozenset({"x"}))
    assert cleared(here, there, replace(wish, colocation=Colocation.ANY)).bids == ()
