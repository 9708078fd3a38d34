"""The payload: one member's pseudo-gradient of one round as bytes. The byte format is written in worker_agent.protocol.

Invariants. `decode(encode(x))` differs from x by at most half a scale per value (int4, int8), so what error feedback
keeps is exact: decoded + residual == x, bit for bit, since by Sterbenz's lemma the difference of two values within a
factor of two of each other has no rounding. Bytes from a stranger raise PayloadError and nothing else, before memory
is set aside for what they claim to hold.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import msgspec
import torch
from torch import Tensor

from worker_agent.protocol import CODEC_BLOCK, CODEC_BLOCK_MAX, PAYLOAD_HEADER_MAX_BYTES, PAYLOAD_MAGIC
from worker_agent.protocol import PayloadHeader as PayloadHeader
from worker_agent.trainer.errors import PayloadError
from worker_agent.trainer.state import little_endian_bytes

Codec = Literal["fp32", "bf16", "int8", "int4"]

_MAX_SCALE = (
    65_504.0  # the largest finite fp16: a value beyond scale * limit is clipped, and the residual keeps the rest
)
_LIMITS: dict[str, int] = {"int8": 127, "int4": 7}


def encode(flat: Tensor, header: PayloadHeader) -> bytes:
    """`flat` (fp32, CPU) as a payload. Not-a-number and infinity are refused here rather than by everybody else."""
    if flat.dtype != torch.float32 or flat.dim() != 1 or flat.numel() != header.numel:
        raise PayloadError("shape", f"expected {header.numel} fp32 values, got {flat.numel()} of {flat.dtype}")
    _check_block(header.block)
    if not torch.isfinite(flat).all():
        raise PayloadError("not_finite", "the pseudo-gradient has values that are not finite")
    head = msgspec.json.encode(header)
    if len(head) > PAYLOAD_HEADER_MAX_BYTES:
        raise PayloadError("header", f"the header takes {len(head)} bytes, {PAYLOAD_HEADER_MAX_BYTES} are allowed")
    return b"".join((PAYLOAD_MAGIC, struct.pack("<I", len(head)), head, *_encode_body(flat, header)))


def encode_with_feedback(delta: Tensor, residual: Tensor | None, header: PayloadHeader) -> tuple[bytes, Tensor, Tensor]:
    """Encode delta plus what earlier rounds left over. Returns (payload, decoded, new residual); the caller keeps the
    new residual only once the round's manifest has the payload, or what was left out would be lost or counted
    twice."""
    wanted = delta if residual is None else torch.add(delta, residual)
    payload = encode(wanted, header)
    decoded = decode(payload)
    return payload, decoded, torch.sub(wanted, decoded)


def decode(payload: bytes, *, numel: int | None = None, layout_digest: str | None = None) -> Tensor:
    """The payload as a flat fp32 vector; `numel` and `layout_digest`, when given, must match."""
    header, body = split(payload)
    if numel is not None and header.numel != numel:
        raise PayloadError("shape", f"the payload has {header.numel} values, the model {numel}")
    if layout_digest is not None and header.layout_digest != layout_digest:
        raise PayloadError("shape", "the payload's parameters are named or shaped otherwise than the model's")
    return _decode_body(header, body)


def split(payload: bytes) -> tuple[PayloadHeader, memoryview]:
    """Header and body, both proved consistent: the body's length is exactly what the header asks for."""
    view = memoryview(payload)
    start = len(PAYLOAD_MAGIC) + 4
    if len(view) < start or view[: len(PAYLOAD_MAGIC)] != PAYLOAD_MAGIC:
        raise PayloadError("header", "not a payload of this protocol")
    (length,) = struct.unpack("<I", view[len(PAYLOAD_MAGIC) : start])
    if length > PAYLOAD_HEADER_MAX_BYTES or start + length > len(view):
        raise PayloadError("header", f"a header of {length} bytes does not fit")
    try:
        header = msgspec.json.decode(view[start : start + length], type=PayloadHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PayloadError("header", f"the header cannot be read: {error}") from error
    _check_block(header.block)
    if header.numel < 1 or header.tokens < 0 or header.round < 0:
        raise PayloadError("header", "a count in the header is out of range")
    body = view[start + length :]
    if len(body) != body_size(header.codec, header.numel, header.block):
        raise PayloadError("shape", f"{len(body)} bytes do not hold {header.numel} values of {header.codec}")
    return header, body


def body_size(codec: str, numel: int, block: int = CODEC_BLOCK) -> int:
    """Bytes of a body, in integers of any size: nothing is allocated for a claim that the bytes do not back."""
    blocks = -(-numel // block)
    sizes = {"fp32": numel * 4, "bf16": numel * 2, "int8": blocks * (2 + block), "int4": blocks * (2 + block // 2)}
    return sizes[codec]


def header_for(
    codec: Codec, *, numel: int, layout_digest: str, job_id: str, round: int, member_id: str, tokens: int
) -> PayloadHeader:
    return PayloadHeader(
        codec=codec,
        block=CODEC_BLOCK,
        numel=numel,
        layout_digest=layout_digest,
        job_id=job_id,
        round=round,
        member_id=member_id,
        tokens=tokens,
    )


def norm(flat: Tensor) -> float:
    """The Euclidean norm, accumulated in double: the figure the control plane compares members by."""
    return math.sqrt(float(torch.sum(torch.square(flat.double()))))


def _check_block(block: int) -> None:
    if not 2 <= block <= CODEC_BLOCK_MAX or block % 2:
        raise PayloadError("header", f"a block of {block} values is not supported")


def _encode_body(flat: Tensor, header: PayloadHeader) -> tuple[bytes | memoryview, ...]:
    if header.codec == "fp32":
        return (little_endian_bytes(flat),)
    if header.codec == "bf16":
        return (_bytes_of(flat.to(torch.bfloat16)),)
    limit = _LIMITS[header.codec]
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % header.block)).view(-1, header.block)
    scales = _fp16_scales(blocks.abs().amax(dim=1), limit)
    wide = scales.float().unsqueeze(1)
    codes = torch.where(wide > 0, blocks / wide, 0.0).round_().clamp_(-limit, limit).to(torch.int8)
    if header.codec == "int8":
        return _bytes_of(scales), _bytes_of(codes)
    nibbles = (codes & 0x0F).view(torch.uint8)
    return _bytes_of(scales), _bytes_of(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))


def _fp16_scales(absmax: Tensor, limit: int) -> Tensor:
    """absmax / limit, rounded up to fp16: rounded down, the largest value of a block would be clipped.

    Zero stays zero; the smallest positive fp16 serves anything below it; above the largest the scale saturates."""
    exact = (absmax / limit).clamp_(max=_MAX_SCALE)
    scales = exact.to(torch.float16)
    short = (scales.float() * limit < absmax) & (scales < _MAX_SCALE)
    return (scales.view(torch.int16) + short.to(torch.int16)).view(
        torch.float16
    )  # the next fp16 up, as they are ordered


def _decode_body(header: PayloadHeader, body: memoryview) -> Tensor:
    if header.codec in ("fp32", "bf16"):
        flat = torch.frombuffer(
            bytearray(body), dtype=torch.float32 if header.codec == "fp32" else torch.bfloat16
        ).float()
        if not torch.isfinite(flat).all():
            raise PayloadError("not_finite", "the payload has values that are not finite")
        return flat
    limit = _LIMITS[header.codec]
    blocks = -(-header.numel // header.block)
    scales = torch.frombuffer(bytearray(body[: 2 * blocks]), dtype=torch.float16).float()
    if not torch.isfinite(scales).all() or (scales < 0).any():
        raise PayloadError("not_finite", "a scale is negative or not finite")
    raw = bytearray(body[2 * blocks :])
    if header.codec == "int8":
        codes = torch.frombuffer(raw, dtype=torch.int8)
    else:
        packed = torch.frombuffer(raw, dtype=torch.uint8)
        nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=1).flatten().to(torch.int8)
        codes = torch.where(nibbles > 7, nibbles - 16, nibbles)
    if (codes < -limit).any():
        raise PayloadError("header", "a code is outside the codec's range")
    if codes[header.numel :].any():
        raise PayloadError("header", "the padding is not zero")
    flat = (codes.view(blocks, header.block).float() * scales.unsqueeze(1)).flatten()[: header.numel]
    return flat.contiguous()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
