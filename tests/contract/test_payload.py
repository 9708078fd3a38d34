"""The trainer writes payloads with torch, the control plane reads them with numpy: one format, two readers."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marketplace.training.payloads import PayloadFault, body_bytes, inspect, split
from worker_agent.protocol import PAYLOAD_MAGIC
from worker_agent.trainer import codec

LAYOUT = "1" * 64
CODECS = ["fp32", "bf16", "int8", "int4"]


def payload_of(values: torch.Tensor, name: str) -> bytes:
    header = codec.header_for(
        name,  # type: ignore[arg-type]  # one of CODECS
        numel=values.numel(),
        layout_digest=LAYOUT,
        job_id="job_1",
        round=3,
        member_id="mbr_1",
        tokens=40,
    )
    return codec.encode(values, header)


def outcome_of(payload: bytes) -> str:
    """The fault's word, or that the payload counts; any other exception is the test's failure."""
    try:
        reading = inspect(payload, numel=300, layout_digest=LAYOUT)
    except PayloadFault as fault:
        return fault.reason
    return "counts" if math.isfinite(reading.norm) else "an infinite norm"


@pytest.mark.parametrize("name", CODECS)
@given(numel=st.integers(1, 1500), seed=st.integers(0, 2**31))
def test_both_readers_measure_the_same_norm(name: str, numel: int, seed: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    payload = payload_of(values, name)
    reading = inspect(payload, numel=numel, layout_digest=LAYOUT)
    assert reading.norm == pytest.approx(codec.norm(codec.decode(payload)), rel=1e-9)
    assert (reading.header.round, reading.header.tokens) == (3, 40)


@pytest.mark.parametrize("name", CODECS)
@given(numel=st.integers(1, 10**12))
def test_both_readers_ask_for_the_same_bytes(name: str, numel: int) -> None:
    assert body_bytes(name, numel, 256) == codec.body_size(name, numel, 256)


@given(junk=st.binary(max_size=200), name=st.sampled_from(CODECS), data=st.data())
def test_a_strangers_bytes_raise_a_payload_fault_and_nothing_else(junk: bytes, name: str, data: st.DataObject) -> None:
    good = payload_of(torch.ones(300), name)
    at = data.draw(st.integers(0, len(good)))
    for payload in (junk, good[:at], good[:at] + junk + good[at + len(junk) :], PAYLOAD_MAGIC + junk):
        assert outcome_of(payload) in {"counts", "header", "shape", "not_finite"}


def test_values_that_are_not_finite_are_refused() -> None:
    for name, poison in (("fp32", struct.pack("<f", math.nan)), ("bf16", b"\x80\x7f"), ("int8", b"\x00\x7c")):
        payload = bytearray(payload_of(torch.ones(300), name))
        _, body = split(bytes(payload))
        start = len(payload) - len(body)
        payload[start : start + len(poison)] = poison
        with pytest.raises(PayloadFault) as caught:
            inspect(bytes(payload), numel=300, layout_digest=LAYOUT)
        assert caught.value.reason == "not_finite"


def test_another_models_shape_is_refused() -> None:
    payload = payload_of(torch.ones(300), "int4")
    for numel, layout in ((301, LAYOUT), (300, "2" * 64)):
        with pytest.raises(PayloadFault) as caught:
            inspect(payload, numel=numel, layout_digest=layout)
        assert caught.value.reason == "shape"
