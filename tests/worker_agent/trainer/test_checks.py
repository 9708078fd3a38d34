"""Which contributions count, and how much of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.protocol import NORM_CAP, NORM_LIMIT, BlobRef, SubmitRequest
from worker_agent.trainer import codec
from worker_agent.trainer.checks import fault, judge


def submission(norm: float, base: str = "0" * 64) -> SubmitRequest:
    return SubmitRequest(
        generation=1,
        instance="i",
        round=0,
        blob=BlobRef(digest="d", size_bytes=1),
        tokens=128,
        steps=1,
        base_state_digest=base,
        train_loss_nats=1.0,
        norm=norm,
        compute_ms=1,
    )


def test_with_three_or_more_the_odd_one_is_shrunk_or_left_out() -> None:
    clips, refused = judge({"a": submission(1), "b": submission(1), "c": submission(2), "d": submission(9)})
    assert clips == {"a": 1.0, "b": 1.0, "c": 1.0}  # the median of four is 1.5
    assert refused == {"d": "norm"}
    clips, _ = judge({"a": submission(1), "b": submission(1), "c": submission(2)})
    assert clips["c"] == 0.75


def test_with_two_there_is_no_telling_which_one_is_odd() -> None:
    assert judge({"a": submission(1), "b": submission(100)}) == ({"a": 1.0, "b": 1.0}, {})


def test_what_started_from_another_state_than_most_did_is_left_out_and_weighs_in_no_median() -> None:
    clips, refused = judge({"a": submission(1), "b": submission(1), "c": submission(50, base="1" * 64)})
    assert clips == {"a": 1.0, "b": 1.0}
    assert refused == {"c": "base_state"}


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=8))
def test_everybody_is_kept_or_refused_and_nothing_kept_is_above_the_cap(norms: dict[str, float]) -> None:
    clips, refused = judge({member_id: submission(norm) for member_id, norm in norms.items()})
    assert clips.keys() | refused.keys() == norms.keys()
    assert not clips.keys() & refused.keys()
    assert all(0 < clip <= 1 for clip in clips.values())
    if len(norms) >= 3 and (median := sorted(norms.values())[len(norms) // 2]):
        assert all(clip * norms[member_id] <= NORM_CAP * median * 1.000001 for member_id, clip in clips.items())
        assert all(norm <= NORM_LIMIT * median for member_id, norm in norms.items() if member_id in clips)


def test_a_payload_whose_norm_is_not_the_one_reported_is_at_fault() -> None:
    header = codec.header_for("fp32", numel=2, layout_digest="", job_id="j", round=0, member_id="m", tokens=1)
    payload = codec.encode(torch.tensor([3.0, 4.0]), header)
    assert fault(payload, submission(5.0)) is None
    assert fault(payload, submission(1.0)) == "norm"
    assert fault(b"junk", submission(5.0)) == "header"
