"""When a round is sealed, and what of it counts. Pure: the seats as they stand go in, the outcome comes out.

Sources: the round protocol of Decoupled DiLoCo (arXiv 2604.21428: quorum, grace, token weights) and clipping to a
multiple of the median norm as in robust aggregation. Invariant: the outcome depends on nothing but the arguments, is
ordered by member id, and every seat is either an entry or a refusal with one word for the reason.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from worker_agent.protocol import NORM_CAP, NORM_LIMIT, NORMS_TO_JUDGE, BlobRef, ManifestEntry, Refusal


@dataclass(frozen=True)
class Contribution:
    """A submission whose payload passed by itself. `norm` is what we measured, not what was claimed."""

    blob: BlobRef
    tokens: int
    norm: float
    base_state_digest: str


@dataclass(frozen=True)
class Seat:
    """One member of the round's roster. `gone`: its lease ended or its island is lost; nothing more will come."""

    member_id: str
    contribution: Contribution | None = None
    gone: bool = False
    fault: str | None = None  # why its last submission was refused by itself


@dataclass(frozen=True)
class Outcome:
    entries: tuple[ManifestEntry, ...]
    refused: tuple[Refusal, ...]
    tokens: int
    base_state_digest: str | None


def quorum_reached(seats: Sequence[Seat], quorum: float) -> bool:
    """At least one contribution, and at least the `quorum` share of the members that can still be expected."""
    there = sum(seat.contribution is not None for seat in seats)
    expected = sum(not seat.gone or seat.contribution is not None for seat in seats)
    return there > 0 and there >= quorum * expected


def is_due(
    seats: Sequence[Seat], *, now_ms: int, deadline_ms: int, quorum_at_ms: int | None, quorum: float, grace_ms: int
) -> bool:
    """Whether the round is to be sealed now.

    It is when every member that can still be expected has submitted; when the quorum was reached and the grace is
    over; or at the deadline with what is there. Without any contribution it never is.
    """
    if not any(seat.contribution is not None for seat in seats):
        return False
    if all(seat.contribution is not None or seat.gone for seat in seats) or now_ms >= deadline_ms:
        return True
    return quorum_at_ms is not None and quorum_reached(seats, quorum) and now_ms >= quorum_at_ms + grace_ms


def majority_of(digests: Sequence[str]) -> str | None:
    """What most hold; ties are broken by the digest itself, so that every caller breaks them alike."""
    counts = Counter(digests)
    return min(counts, key=lambda digest: (-counts[digest], digest), default=None)


def leader_of(digests: Sequence[str]) -> str:
    """What more hold than anything else; "" while that cannot be told: nobody is sent back over a tie."""
    counts = Counter(digests).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return ""
    return counts[0][0]


def outcome_of(seats: Sequence[Seat]) -> Outcome:
    """What counts: the majority's base state, norms within the limit of the median, clipped to its cap."""
    ordered = sorted(seats, key=lambda seat: seat.member_id)
    given = [seat.contribution for seat in ordered if seat.contribution is not None]
    majority = majority_of([contribution.base_state_digest for contribution in given])
    norms = [contribution.norm for contribution in given if contribution.base_state_digest == majority]
    median = statistics.median(norms) if len(norms) >= NORMS_TO_JUDGE else 0.0
    entries: list[ManifestEntry] = []
    refused: list[Refusal] = []
    for seat in ordered:
        contribution = seat.contribution
        if contribution is None:
            reason = seat.fault or ("lost" if seat.gone else "not_submitted")
            refused.append(Refusal(member_id=seat.member_id, reason=reason))
        elif contribution.base_state_digest != majority:
            refused.append(Refusal(member_id=seat.member_id, reason="base_state"))
        elif contribution.tokens < 1:
            refused.append(Refusal(member_id=seat.member_id, reason="no_tokens"))
        elif median and contribution.norm > NORM_LIMIT * median:
            refused.append(Refusal(member_id=seat.member_id, reason="norm"))
        else:
            cap = NORM_CAP * median
            clip = cap / contribution.norm if median and contribution.norm > cap else 1.0
            entries.append(
                ManifestEntry(member_id=seat.member_id, blob=contribution.blob, weight=contribution.tokens, clip=clip)
            )
    tokens = sum(entry.weight for entry in entries)
    return Outcome(tuple(entries), tuple(refused), tokens, majority)
