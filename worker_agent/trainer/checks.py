"""The checks on every contribution: by itself when it arrives, against the others when the round is sealed.

Pure. Invariant: what is refused is refused for all members, with one word for the reason, and a contribution's clip is
part of the sealed manifest, so that nobody's arithmetic depends on its own opinion of the others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from worker_agent.protocol import NORM_CAP, NORM_LIMIT, NORMS_TO_JUDGE, SubmitRequest
from worker_agent.trainer import codec
from worker_agent.trainer.errors import PayloadError

_NORM_TOLERANCE = 1e-3  # the figure may come from a float sum in another order


def fault(payload: bytes, request: SubmitRequest) -> str | None:
    """What is wrong with a payload by itself; None where nothing is."""
    try:
        vector = codec.decode(payload)
    except PayloadError as error:
        return error.reason
    return None if abs(codec.norm(vector) - request.norm) <= _NORM_TOLERANCE * max(1.0, request.norm) else "norm"


def judge(submissions: Mapping[str, SubmitRequest]) -> tuple[dict[str, float], dict[str, str]]:
    """The clip of each member that counts, and why each of the others does not."""
    clips: dict[str, float] = {}
    refused: dict[str, str] = {}
    bases = Counter(request.base_state_digest for request in submissions.values())
    # A tie is broken by the digest itself, so that every caller breaks it alike.
    majority = min(bases, key=lambda digest: (-bases[digest], digest), default=None)
    norms = [request.norm for request in submissions.values() if request.base_state_digest == majority]
    median = statistics.median(norms) if len(norms) >= NORMS_TO_JUDGE else 0.0
    for member_id, request in sorted(submissions.items()):
        if request.base_state_digest != majority:
            refused[member_id] = "base_state"
        elif median and request.norm > NORM_LIMIT * median:
            refused[member_id] = "norm"
        else:
            clips[member_id] = min(1.0, NORM_CAP * median / request.norm) if median and request.norm else 1.0
    return clips, refused
