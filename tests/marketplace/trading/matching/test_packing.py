"""Asks that are sold whole: packed as well as can be, worth their reserve, and paid to the micro-dollar."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from marketplace.trading.matching import Ask, Bid
from marketplace.trading.matching.packing import EXACT_MAX, pack, reserve_uusd, worth_uusd
from tests.marketplace.trading.matching.build import HOUR, ask, bid

HOURS = 6


@st.composite
def bids(draw: st.DrawFn, most: int = 6) -> list[Bid]:
    found = []
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, HOURS - 1))
        end = draw(st.integers(start + 1, HOURS))
        found.append(bid(draw(st.integers(1, 3)), start, end, draw(st.sampled_from([0.6, 1.2, 1.8, 3.0]))))
    return found


def whole(lots: int = 3, dollars: float = 1.2) -> Ask:
    return ask(lots, 0, HOURS, dollars, all_or_none=True)


def fits(offer: Ask, some: tuple[Bid, ...]) -> bool:
    return all(
        sum(each.lots for each in some if each.start_min <= hour * HOUR < each.end_min) <= offer.lots
        for hour in range(HOURS)
    )


def most_by_trying(offer: Ask, wishes: list[Bid]) -> int:
    worths = [
        sum(worth_uusd(each) for each in some)
        for size in range(len(wishes) + 1)
        for some in combinations(wishes, size)
        if fits(offer, some)
    ]
    return max(worths)


@given(wishes=bids(), lots=st.integers(1, 4), dollars=st.sampled_from([0.6, 1.2, 1.8]))
def test_the_packing_is_worth_most_and_sold_only_for_its_reserve(wishes: list[Bid], lots: int, dollars: float) -> None:
    offer = whole(lots, dollars)
    shares = pack(offer, wishes)
    most = most_by_trying(offer, [each for each in wishes if each.lots <= lots])
    if most < reserve_uusd(offer):
        assert shares == []
        return
    assert sum(worth_uusd(share.bid) for share in shares) == most
    assert fits(offer, tuple(share.bid for share in shares))
    assert sum(share.pays_uusd for share in shares) == reserve_uusd(offer)
    assert all(0 <= share.pays_uusd <= worth_uusd(share.bid) for share in shares)


@given(wishes=st.lists(bids(), min_size=6, max_size=8).map(lambda found: [each for some in found for each in some]))
def test_with_many_bids_the_packing_still_fits_and_pays_the_reserve(wishes: list[Bid]) -> None:
    offer = whole()
    shares = pack(offer, wishes)
    assert fits(offer, tuple(share.bid for share in shares))
    assert not shares or sum(share.pays_uusd for share in shares) == reserve_uusd(offer)
    assert len({(share.bid.id, share.bid.part) for share in shares}) == len(shares)


def test_a_swap_finds_what_the_densest_first_misses() -> None:
    """One dear short bid keeps out one long one that is worth more; among more bids than are tried in full."""
    offer = whole(1, 1.2)
    short, long = bid(1, 0, 1, 3.0), bid(1, 0, HOURS, 1.8)
    chaff = [bid(1, 0, 1, 0.6) for _ in range(EXACT_MAX)]
    (share,) = pack(offer, [short, long, *chaff])
    assert share.bid is long


def test_bids_that_reach_beyond_the_ask_or_are_its_owners_stay_out() -> None:
    offer = whole(1, 0.6)
    mine = bid(1, 0, HOURS, 3.0, account=offer.account)
    beyond, elsewhere = bid(1, 0, HOURS + 1, 3.0), bid(1, 0, HOURS, 3.0, skus=frozenset({"other"}))
    assert pack(offer, [mine, beyond, elsewhere]) == []
    assert pack(offer, [bid(1, 0, HOURS, 0.6)])
