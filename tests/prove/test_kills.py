"""A run in which everything is killed once, by SIGKILL, and what must be true of it all the same: it trained every
token, its members agree, its money is right, and nobody was paid twice."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from marketplace.devstack.demo import facts
from marketplace.devstack.demo.facts import Claim
from marketplace.devstack.demo.story import PLANS, Story
from marketplace.devstack.demo.voice import Voice
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.prove.ordeal import A_LOT_GPU_MS, AGENT_LOST, POWER_LOST, TRAINER_LOST, Ordeal, begin

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

MS_PER_HOUR = 3_600_000
FEE_BPS = 500
EXIT_UNAUTHORISED = 6


@pytest.fixture(scope="module")
def ordeal(stack_state: StateDir) -> Iterator[Ordeal]:
    env = {"ARCHIPELAGO_FLEET_SYNC_MS": "1000"}
    # Not fragile: a database that is killed must keep what it acknowledged.
    with Stack(stack_state, web_port=0, debug=False, env=env) as stack:
        story = Story(stack, Voice(io.StringIO()), stack_state.path / "agents")
        try:
            told = begin(stack, story)
            told.kill_everything()
            told.see_it_through()
            yield told
        finally:
            story.close()


def unmet(claims: list[Claim]) -> list[str]:
    return [f"{claim.what}: {claim.seen}" for claim in claims if not claim.holds]


def test_the_run_went_on_after_every_kill(ordeal: Ordeal) -> None:
    for kill in ordeal.kills:
        print(f"{kill.what:<36} in round {kill.in_round:>3}, sealed {kill.sealed_round:>3}, {kill.took_s:5.1f} s")
    assert [kill.what for kill in ordeal.kills] == [
        "a trainer",
        "an agent",
        "a whole cluster",
        "web",
        "worker",
        "beat",
        "valkey",
        "postgres",
        "web, for long",
        "the whole control plane",
        "an agent, for another in its place",
    ]
    assert all(kill.sealed_round > kill.in_round for kill in ordeal.kills)
    assert ordeal.kills[-1].sealed_round < len(ordeal.rounds)


def test_the_job_trained_all_its_tokens_and_its_members_agree(ordeal: Ordeal) -> None:
    assert unmet(facts.about_training(ordeal.job, ordeal.rounds)) == []
    assert [event["message"] for event in ordeal.events if event["kind"] == "resync"] == []
    for each in ordeal.rounds:
        told = {seat["island_name"]: seat["state_digest"] for seat in each["seats"] if seat["state_digest"]}
        assert len(told) >= 2, f"round {each['number']}: one word is no agreement"
        assert set(told.values()) == {each["state_digest"]}


def test_every_token_is_in_one_round(ordeal: Ordeal) -> None:
    assert [each["number"] for each in ordeal.rounds] == list(range(ordeal.job["rounds_sealed"]))
    assert sum(each["tokens"] for each in ordeal.rounds) == ordeal.job["tokens_sealed"]
    for each in ordeal.rounds:
        assert each["tokens"] == sum(seat["tokens"] for seat in each["seats"] if seat["accepted"])
    for before, after in pairwise(ordeal.rounds):
        assert after["tokens_after"] == before["tokens_after"] + after["tokens"]


def test_no_island_lost_its_place(ordeal: Ordeal) -> None:
    """What came back took up its own lease: one for each island, held to the end of the job."""
    assert sorted(member["island_name"] for member in ordeal.job["members"]) == sorted(plan.name for plan in PLANS)
    assert {lease["end_reason"] for lease in ordeal.leases} <= {"released", "job_succeeded"}
    last = {seat["island_name"] for seat in ordeal.rounds[-1]["seats"] if seat["accepted"]}
    assert len(last) >= 2


def test_only_a_dead_trainer_is_started_again(ordeal: Ordeal) -> None:
    restarted = Counter(
        plan.name
        for event in ordeal.events
        for plan in PLANS
        if event["kind"] == "restarted" and "generation" in event["detail"] and f" on {plan.name} " in event["message"]
    )
    assert restarted[TRAINER_LOST] == 1
    assert restarted[AGENT_LOST] == 0
    assert restarted[POWER_LOST] <= 1


def test_the_books_are_right(ordeal: Ordeal) -> None:
    assert unmet(facts.about_money(ordeal.job, ordeal.buyer, ordeal.seller)) == []
    assert "invariants hold" in ordeal.story.manage("check_ledger")


def test_what_was_charged_is_what_was_metered_at_the_price_agreed(ordeal: Ordeal) -> None:
    for lease in ordeal.leases:
        rate, gpu_ms = lease["price_uusd_per_gpu_hour"], lease["delivered_gpu_ms"]
        assert lease["charged_uusd"] == rate * gpu_ms // MS_PER_HOUR
        assert lease["held_uusd"] == 0
        assert lease["settled_at"] is not None
    charged = [lease["charged_uusd"] for lease in ordeal.leases]
    assert ordeal.job["spent_uusd"] == sum(charged) <= ordeal.job["budget_uusd"]
    sold = ordeal.seller.get("statement")
    assert sum(line["fee_uusd"] or 0 for line in sold["lines"]) == sum(each * FEE_BPS // 10_000 for each in charged)


def test_no_gpu_was_metered_longer_than_it_was_held(ordeal: Ordeal) -> None:
    for lease in ordeal.leases:
        assert 0 < lease["delivered_gpu_ms"] <= lease["gpus"] * held_s(lease) * 1000 <= lease["window_gpu_ms"]


def test_a_cluster_without_power_is_not_metered(ordeal: Ordeal) -> None:
    lease = lease_on(ordeal, POWER_LOST)
    assert ordeal.dark_s > 1
    assert lease["delivered_gpu_ms"] <= lease["gpus"] * (held_s(lease) - ordeal.dark_s) * 1000


def test_a_dead_agent_costs_its_seller_nothing_while_the_trainer_works(ordeal: Ordeal) -> None:
    """But for the moments until it heard of the lease and from its last word to the lease's end."""
    lease = lease_on(ordeal, AGENT_LOST)
    assert lease["delivered_gpu_ms"] >= lease["gpus"] * (held_s(lease) - 10) * 1000


def test_the_seller_is_paid_for_all_that_was_trained(ordeal: Ordeal) -> None:
    """A kill costs the seller at most the moments it took: what counted in rounds was computed, metered and charged."""
    for member, lease in zip(ordeal.job["members"], ordeal.leases, strict=True):
        seats = [seat for each in ordeal.rounds for seat in each["seats"] if seat["member_id"] == member["id"]]
        computed_ms = sum(seat["compute_ms"] for seat in seats if seat["accepted"])
        assert lease["delivered_gpu_ms"] >= computed_ms * lease["gpus"]


def test_a_kill_is_an_answer_to_try_again_and_never_an_error_of_ours(ordeal: Ordeal) -> None:
    told = ordeal.stack.log("web").read_text()
    assert "was not answered" in told
    assert not [line for line in told.splitlines() if "Internal Server Error" in line or line.endswith(" failed")]
    assert [(status, retry) for status, retry, _ in ordeal.told_meanwhile] == [(503, "1")] * 2
    assert all("nothing was done" in text for _, _, text in ordeal.told_meanwhile)


def test_no_two_transactions_stopped_each_other(ordeal: Ordeal) -> None:
    assert "deadlock detected" not in ordeal.stack.log("postgres").read_text()


def test_a_double_of_the_agent_is_told_that_it_is_stale(ordeal: Ordeal) -> None:
    fenced = ordeal.fenced
    assert fenced is not None
    assert fenced.exit_code == EXIT_UNAUTHORISED
    assert "enrolled anew" in fenced.said
    assert fenced.forged == [(409, "stale_epoch"), (409, "stale_epoch")]


def test_a_double_of_the_agent_charges_nothing(ordeal: Ordeal) -> None:
    fenced = ordeal.fenced
    assert fenced is not None
    assert fenced.counted_after == fenced.counted_before
    counted = ordeal.counters(fenced.lease_id)
    assert len(counted) == 2
    assert sum(counted.values()) < A_LOT_GPU_MS
    (lease,) = (each for each in ordeal.leases if each["id"] == fenced.lease_id)
    assert lease["delivered_gpu_ms"] <= sum(counted.values())


def test_what_an_agent_counted_before_it_was_enrolled_anew_is_not_counted_again(ordeal: Ordeal) -> None:
    fenced = ordeal.fenced
    assert fenced is not None
    (lease,) = (each for each in ordeal.leases if each["id"] == fenced.lease_id)
    began = datetime.fromisoformat(lease["created_at"])
    heard = ordeal.heard(fenced.lease_id)
    assert len(heard) > 2
    # An agent hears of the end at its next call and counts until then: each report is held against its own time.
    for at, gpu_ms in heard:
        assert gpu_ms <= lease["gpus"] * (at - began).total_seconds() * 1000, (at, lease["ended_at"])
    assert lease["delivered_gpu_ms"] <= lease["gpus"] * held_s(lease) * 1000


def test_a_double_of_the_agent_ends_no_trainer_of_the_other(ordeal: Ordeal) -> None:
    fenced = ordeal.fenced
    assert fenced is not None
    assert fenced.trainers_before
    assert fenced.trainers_after == fenced.trainers_before


def lease_on(ordeal: Ordeal, island: str) -> dict[str, Any]:
    (lease,) = (each for each in ordeal.leases if each["island"]["name"] == island)
    return lease


def held_s(lease: dict[str, Any]) -> float:
    held = datetime.fromisoformat(lease["ended_at"]) - datetime.fromisoformat(lease["created_at"])
    return held.total_seconds()
