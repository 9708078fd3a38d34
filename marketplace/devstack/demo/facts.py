"""What the demo prints at its end, and what must be true of it. Everything here was read back from the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marketplace.core.money import format_usd
from marketplace.devstack.demo.customer import Customer
from marketplace.devstack.demo.voice import Voice

# A model that learnt nothing stays where it began, near 7.6 bits of 8.
LEARNT_BITS_PER_BYTE = 3.2
ACCOUNTS = ("cash_uusd", "held_uusd", "earned_uusd", "payable_uusd")


@dataclass(frozen=True)
class Claim:
    """Something the story promised, and whether it holds."""

    what: str
    holds: bool
    seen: str


def rounds_table(voice: Voice, rounds: Sequence[dict[str, Any]]) -> None:
    voice.title("Rounds and their rosters")
    rows = []
    for each in rounds:
        counted = [seat["island_name"] for seat in each["seats"] if seat["accepted"]]
        left_out = [f"{seat['island_name']} ({seat['refused_why']})" for seat in each["seats"] if not seat["accepted"]]
        bits = each["heldout_bits_per_byte"]
        rows.append(
            (
                str(each["number"]),
                f"{each['tokens']:,}",
                "-" if bits is None else f"{bits:.3f}",
                f"{each['bytes_sent'] / 1000:,.0f}",
                "-" if each["spent_uusd"] is None else format_usd(each["spent_uusd"], 4),
                each["state_digest"][:8] or "-",
                ", ".join(counted),
                ", ".join(left_out) or "-",
            )
        )
    head = ("round", "tokens", "bits/byte", "kB sent", "spent so far", "state", "counted", "left out")
    voice.table(head, rows, "rrrrrlll")


def invoice(voice: Voice, buyer: Customer, job: dict[str, Any]) -> None:
    voice.title("Invoice of the job")
    rows = []
    for member in job["members"]:
        lease = buyer.get(f"leases/{member['lease_id']}")
        rows.append(
            (
                member["island_name"],
                f"{member['gpus']} x {member['gpu']}",
                format_usd(member["price_uusd_per_gpu_hour"], 2),
                f"{lease['delivered_gpu_ms'] / 1000:,.1f}",
                format_usd(lease["charged_uusd"], 6),
                member["gone_why"],
            )
        )
    rows.append(("total", "", "", "", format_usd(job["spent_uusd"], 6), f"of {format_usd(job['budget_uusd'])}"))
    voice.table(("island", "GPUs", "$/GPU-h", "GPU-s", "charged", "left because"), rows, "llrrrl")


def seller_lines(voice: Voice, seller: Customer) -> None:
    voice.title("The seller's statement")
    statement = seller.get("statement")
    rows = [
        (line["what"], line["ref"], format_usd(line["moved"]["earned_uusd"], 6), _fee(line))
        for line in statement["lines"]
    ]
    rows.append(("closing", "", format_usd(statement["closing"]["earned_uusd"], 6), ""))
    voice.table(("what", "ref", "earned", "our fee, taken off"), rows, "llrr")


def about_training(job: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> list[Claim]:
    """What holds of any run that came to its end, whatever happened to it on the way."""
    first, last = job["bits_per_byte_first"], job["bits_per_byte_last"]
    differing = [
        each["number"]
        for each in rounds
        if any(seat["state_digest"] not in ("", each["state_digest"]) for seat in each["seats"])
    ]
    hashed = sum(bool(each["state_digest"]) for each in rounds)
    return [
        Claim("the job succeeded", job["state"] == "succeeded", job["reason"]),
        Claim(
            "all its tokens are trained",
            job["tokens_sealed"] >= job["tokens_target"],
            f"{job['tokens_sealed']:,} of {job['tokens_target']:,} in {len(rounds)} rounds",
        ),
        Claim(
            "held-out text is compressed better than before",
            first is not None and last is not None and last < LEARNT_BITS_PER_BYTE < first,
            f"{first or 0:.3f} -> {last or 0:.3f} bits per byte",
        ),
        Claim(
            "every state was the same on every island",
            not differing and hashed == len(rounds),
            f"{hashed} of {len(rounds)} states hashed, {len(differing)} differed",
        ),
    ]


def about_islands(rounds: Sequence[dict[str, Any]], *, cut: tuple[str, int], late: str) -> list[Claim]:
    """That islands went and came while it trained: `cut` was cut off in a round, `late` joined after that."""
    name, number = cut
    seats_of_cut = [seat for each in rounds for seat in each["seats"] if seat["island_name"] == name]
    in_its_round = [
        seat["refused_why"]
        for each in rounds
        if each["number"] == number
        for seat in each["seats"]
        if seat["island_name"] == name and not seat["accepted"]
    ]
    by_late = sum(seat["accepted"] is True for each in rounds for seat in each["seats"] if seat["island_name"] == late)
    took_part = {seat["island_name"] for each in rounds for seat in each["seats"] if seat["accepted"]}
    return [
        Claim("four islands took part", len(took_part) == 4, ", ".join(sorted(took_part))),
        Claim(
            "the round in which one was cut off went on without it",
            bool(name) and bool(in_its_round) and any(seat["accepted"] for seat in seats_of_cut),
            f"{name} in round {number}: {', '.join(in_its_round) or 'counted'}",
        ),
        Claim("the island that came late trained too", by_late > 0, f"{late} in {by_late} rounds"),
    ]


def about_money(job: dict[str, Any], buyer: Customer, seller: Customer) -> list[Claim]:
    statement, sold = buyer.get("statement"), seller.get("statement")
    balance = buyer.get("balance")
    fees = sum(line["fee_uusd"] or 0 for line in sold["lines"])
    earned = sold["closing"]["earned_uusd"] + sold["closing"]["payable_uusd"]
    return [
        Claim(
            "the job cost no more than its budget",
            0 < job["spent_uusd"] <= job["budget_uusd"],
            f"{format_usd(job['spent_uusd'], 6)} of {format_usd(job['budget_uusd'])}",
        ),
        Claim("what was held and not used went back", balance["held_uusd"] == 0, format_usd(balance["held_uusd"], 6)),
        Claim(
            "the buyer's statement adds up",
            _adds_up(statement) and statement["closing"]["cash_uusd"] == balance["cash_uusd"],
            f"closing cash {format_usd(statement['closing']['cash_uusd'], 6)}",
        ),
        Claim(
            "the seller was credited what the buyer paid, less our fee",
            _adds_up(sold) and earned + fees == job["spent_uusd"],
            f"{format_usd(earned, 6)} + {format_usd(fees, 6)} = {format_usd(job['spent_uusd'], 6)}",
        ),
    ]


def verdict(voice: Voice, claims: Sequence[Claim]) -> None:
    voice.title("What was claimed")
    for claim in claims:
        voice.line(f"  {'ok  ' if claim.holds else 'FAIL'}  {claim.what:<58} {claim.seen}")
    failed = sum(not claim.holds for claim in claims)
    minutes, seconds = divmod(int(voice.elapsed_s), 60)
    voice.line()
    outcome = "all of it is true" if not failed else f"{failed} of {len(claims)} claims do not hold"
    voice.line(f"{outcome}, in {minutes} min {seconds:02d} s")


def _adds_up(statement: dict[str, Any]) -> bool:
    return all(
        statement["opening"][name] + sum(line["moved"][name] for line in statement["lines"])
        == statement["closing"][name]
        for name in ACCOUNTS
    )


def _fee(line: dict[str, Any]) -> str:
    return "-" if line["fee_uusd"] is None else format_usd(line["fee_uusd"], 6)
