"""Payloads: what survives the encoding, what the residual keeps, and what bytes from a stranger can do (nothing)."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from worker_agent.protocol import PAYLOAD_MAGIC
from worker_agent.trainer import codec
from worker_agent.trainer.errors import PayloadError

CODECS = ("fp32", "bf16", "int8", "int4")
LIMITS = {"int8": 127, "int4": 7}


def header(kind: str, numel: int, block: int = 256) -> codec.PayloadHeader:
    return codec.PayloadHeader(
        codec=kind, block=block, numel=numel, layout_digest="0" * 64, job_id="job", round=3, member_id="m", tokens=9
    )


vectors = hnp.arrays(
    np.float32,
    st.integers(1, 700),
    elements=st.floats(-(2.0**80), 2.0**80, width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-1, 1, width=32)
    | st.just(0.0),
)
moderate = hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-(2.0**15), 2.0**15, width=32))


@given(vectors, st.sampled_from(CODECS))
def test_a_payload_decodes_to_as_many_finite_values_as_went_in(values: np.ndarray, kind: str) -> None:
    flat = torch.from_numpy(values)
    payload = codec.encode(flat, header(kind, len(values)))
    back = codec.decode(payload, numel=len(values), layout_digest="0" * 64)
    assert back.shape == flat.shape
    assert torch.isfinite(back).all()
    assert codec.split(payload)[0] == header(kind, len(values))


@given(moderate, st.sampled_from(("int8", "int4")))
def test_no_value_moves_by_more_than_half_a_step_of_its_block(values: np.ndarray, kind: str) -> None:
    back = codec.decode(codec.encode(torch.from_numpy(values), header(kind, len(values)))).numpy()
    for start in range(0, len(values), 256):
        block, decoded = values[start : start + 256].astype(np.float64), back[start : start + 256].astype(np.float64)
        # fp16 rounds a scale up by one part in 1024 at most, or to its smallest step of 2**-24
        step = max(np.abs(block).max() / LIMITS[kind] * (1 + 2**-9), 2.0**-24) if block.any() else 0.0
        assert np.abs(block - decoded).max() <= step / 2 * (1 + 2**-20)


@given(moderate, st.sampled_from(CODECS), st.integers(0, 2**32 - 1))
def test_decoded_and_residual_add_up_to_exactly_what_was_to_be_sent(values: np.ndarray, kind: str, seed: int) -> None:
    delta = torch.from_numpy(values)
    residual = torch.randn(len(values), generator=torch.Generator().manual_seed(seed)) * 0.01
    _, decoded, left = codec.encode_with_feedback(delta, residual, header(kind, len(values)))
    assert torch.equal(decoded.double() + left.double(), torch.add(delta, residual).double())


def test_fp32_is_lossless_and_leaves_nothing_over() -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    _, decoded, left = codec.encode_with_feedback(flat, None, header("fp32", 1000))
    assert torch.equal(decoded, flat)
    assert not left.any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_largest_value_of_a_block_is_not_clipped_by_the_rounding_of_its_scale(kind: str) -> None:
    for exponent in range(-2, 12):
        flat = torch.tensor([1.0009765, -0.3, 0.1]) * 2.0**exponent
        back = codec.decode(codec.encode(flat, header(kind, 3)))
        assert abs(back[0] - flat[0]) <= abs(flat[0]) * 2**-9


def test_values_beyond_the_reach_of_fp16_scales_neither_overflow_nor_vanish() -> None:
    huge = torch.tensor([3.0e38, -3.0e38, 1.0])
    _, decoded, left = codec.encode_with_feedback(huge, None, header("int4", 3))
    assert decoded[0] == 7 * 65_504.0
    assert torch.isfinite(left).all()
    tiny = torch.full((3,), 1e-12)
    _, decoded, left = codec.encode_with_feedback(tiny, None, header("int4", 3))
    assert torch.equal(decoded + left, tiny)


def test_error_feedback_sends_in_the_end_what_one_round_cannot() -> None:
    generator = torch.Generator().manual_seed(5)
    delta = torch.randn(512, generator=generator) * torch.logspace(-4, 0, 512)
    sent, residual = torch.zeros(512, dtype=torch.float64), None
    for _ in range(200):
        _, decoded, residual = codec.encode_with_feedback(delta, residual, header("int4", 512))
        sent += decoded
    assert torch.allclose(sent / 200, delta.double(), atol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_sent(value: float) -> None:
    with pytest.raises(PayloadError) as caught:
        codec.encode(torch.tensor([1.0, value]), header("int4", 2))
    assert caught.value.reason == "not_finite"


def test_the_bytes_are_those_the_protocol_describes() -> None:
    """By hand, with numpy: so that the format cannot drift together with its own decoder."""
    flat = torch.tensor([7.0, -7.0, 1.0, 0.0, -3.0])
    payload = codec.encode(flat, header("int4", 5, block=4))
    (length,) = struct.unpack_from("<I", payload, 8)
    assert payload[:8] == PAYLOAD_MAGIC
    assert json.loads(payload[12 : 12 + length])["numel"] == 5
    body = payload[12 + length :]
    scales = np.frombuffer(body[:4], "<f2")
    assert scales[0] == 1.0
    assert abs(float(scales[1]) * 7 - 3) < 0.01
    assert list(body[4:]) == [0x7 | (0x9 << 4), 0x1, 0x9, 0x0]


def test_int4_costs_a_little_more_than_half_a_byte_a_value() -> None:
    assert len(codec.encode(torch.randn(256_000), header("int4", 256_000))) * 8 / 256_000 < 4.08


@given(st.binary(max_size=600))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    with pytest.raises(PayloadError):
        codec.decode(data)
    with pytest.raises(PayloadError):
        codec.decode(PAYLOAD_MAGIC + data)


@settings(max_examples=300)
@given(st.sampled_from(CODECS), st.integers(1, 600), st.data())
def test_a_damaged_payload_is_refused_or_still_decodes_to_the_right_number_of_finite_values(
    kind: str, numel: int, data: st.DataObject
) -> None:
    payload = bytearray(codec.encode(torch.linspace(-1, 1, numel), header(kind, numel)))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    for _ in range(data.draw(st.integers(0, 4))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = codec.decode(bytes(payload), numel=numel)
    except PayloadError:
        return
    assert back.numel() == numel
    assert torch.isfinite(back).all()


def test_a_claim_of_a_huge_vector_is_refused_before_memory_is_taken() -> None:
    claim = {
        "codec": "int4",
        "block": 256,
        "numel": 10**15,
        "layout_digest": "",
        "job_id": "",
        "round": 0,
        "member_id": "",
    }
    head = json.dumps({**claim, "tokens": 0}).encode()
    with pytest.raises(PayloadError) as caught:
        codec.decode(PAYLOAD_MAGIC + struct.pack("<I", len(head)) + head + b"\0" * 64)
    assert caught.value.reason == "shape"


def test_another_models_payload_is_refused_by_size_and_by_names() -> None:
    payload = codec.encode(torch.ones(10), header("fp32", 10))
    with pytest.raises(PayloadError):
        codec.decode(payload, numel=11)
    with pytest.raises(PayloadError):
        codec.decode(payload, layout_digest="1" * 64)


@pytest.mark.parametrize(("kind", "spoil"), [("int4", 0x88), ("int8", 0x80)])
def test_codes_outside_the_symmetric_range_and_padding_that_is_not_zero_are_refused(kind: str, spoil: int) -> None:
    payload = bytearray(codec.encode(torch.ones(256), header(kind, 256)))
    payload[-1] = spoil
    with pytest.raises(PayloadError):
        codec.decode(bytes(payload))
    payload = bytearray(codec.encode(torch.ones(100), header(kind, 100)))
    payload[-1] = 0x01
    with pytest.raises(PayloadError):
        codec.decode(bytes(payload))


def test_the_norm_is_the_euclidean_one() -> None:
    assert codec.norm(torch.tensor([3.0, 4.0])) == 5.0
