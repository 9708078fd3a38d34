"""When a round is sealed and what of it counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marketplace.training.sealing import Contribution, Outcome, Seat, is_due, outcome_of, quorum_reached
from worker_agent.protocol import BlobRef

BASE = "b" * 64


def seat(name: str, *, norm: float = 1.0, tokens: int = 100, base: str = BASE) -> Seat:
    blob = BlobRef(digest=name[0] * 64, size_bytes=10)
    return Seat(f"mbr_{name}", Contribution(blob, tokens, norm, base))


def due(*seats: Seat, now_ms: int = 0, quorum_at_ms: int | None = None) -> bool:
    return is_due(seats, now_ms=now_ms, deadline_ms=10_000, quorum_at_ms=quorum_at_ms, quorum=0.5, grace_ms=2_000)


def reasons(outcome: Outcome) -> dict[str, str]:
    return {refusal.member_id: refusal.reason for refusal in outcome.refused}


def test_a_round_is_sealed_as_soon_as_everyone_has_submitted() -> None:
    assert due(seat("a"), seat("b"))


def test_a_lost_member_is_not_waited_for() -> None:
    assert due(seat("a"), Seat("mbr_b", gone=True))


def test_the_quorum_waits_its_grace_for_the_rest() -> None:
    assert not due(seat("a"), Seat("mbr_b"), now_ms=1_999, quorum_at_ms=0)
    assert due(seat("a"), Seat("mbr_b"), now_ms=2_000, quorum_at_ms=0)


def test_below_the_quorum_only_the_deadline_seals() -> None:
    seats = (seat("a"), Seat("mbr_b"), Seat("mbr_c"))
    assert not due(*seats, now_ms=9_999, quorum_at_ms=0)
    assert due(*seats, now_ms=10_000)


def test_a_round_without_any_contribution_is_never_sealed() -> None:
    assert not due(Seat("mbr_a"), Seat("mbr_b", gone=True), now_ms=10**9)
    assert not quorum_reached((Seat("mbr_a", gone=True),), 0.5)


def test_entries_are_ordered_by_member_and_weighted_by_tokens() -> None:
    outcome = outcome_of([seat("b", tokens=7), seat("a", tokens=5)])
    assert [(entry.member_id, entry.weight) for entry in outcome.entries] == [("mbr_a", 5), ("mbr_b", 7)]
    assert outcome.tokens == 12


def test_a_member_that_drifted_from_the_majority_is_refused() -> None:
    outcome = outcome_of([seat("a"), seat("b"), seat("c", base="c" * 64)])
    assert reasons(outcome) == {"mbr_c": "base_state"}
    assert outcome.base_state_digest == BASE


def test_a_norm_above_the_cap_is_clipped_and_above_the_limit_refused() -> None:
    outcome = outcome_of([seat("a"), seat("b"), seat("c", norm=2.0), seat("d", norm=3.1), seat("e")])
    assert {entry.member_id: entry.clip for entry in outcome.entries}["mbr_c"] == 0.75
    assert reasons(outcome) == {"mbr_d": "norm"}


def test_of_two_members_neither_can_be_called_odd() -> None:
    assert len(outcome_of([seat("a"), seat("b", norm=1000.0)]).entries) == 2


def test_who_did_not_submit_is_named_with_the_reason() -> None:
    outcome = outcome_of([seat("a"), Seat("mbr_b"), Seat("mbr_c", gone=True), Seat("mbr_d", fault="not_finite")])
    assert reasons(outcome) == {"mbr_b": "not_submitted", "mbr_c": "lost", "mbr_d": "not_finite"}


seats = st.builds(
    Seat,
    member_id=st.uuids().map(str),
    contribution=st.none()
    | st.builds(
        Contribution,
        blob=st.just(BlobRef(digest="a" * 64, size_bytes=1)),
        tokens=st.integers(0, 10**6),
        norm=st.floats(0, 1e6),
        base_state_digest=st.sampled_from([BASE, "c" * 64]),
    ),
    gone=st.booleans(),
)


@given(roster=st.lists(seats, max_size=8, unique_by=lambda one: one.member_id), data=st.data())
def test_every_seat_is_an_entry_or_a_refusal_whatever_the_order(roster: list[Seat], data: st.DataObject) -> None:
    outcome = outcome_of(roster)
    assert outcome == outcome_of(data.draw(st.permutations(roster)))
    named = [entry.member_id for entry in outcome.entries] + [refusal.member_id for refusal in outcome.refused]
    assert sorted(named) == sorted(one.member_id for one in roster)
    assert all(0 < entry.clip <= 1 and entry.weight > 0 for entry in outcome.entries)
