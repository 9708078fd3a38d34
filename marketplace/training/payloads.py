"""What the control plane knows of a contribution before it counts: its bytes, read with numpy, and no torch.

Pure. The byte format is written in worker_agent.protocol. Invariant: bytes from a stranger raise PayloadFault with one
word for the reason and nothing else, before memory is set aside for what they claim to hold; what passes has the shape
of the job's model, only finite values, and a norm that we measured ourselves.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from worker_agent.protocol import CODEC_BLOCK_MAX, PAYLOAD_HEADER_MAX_BYTES, PAYLOAD_MAGIC, PayloadHeader

# Values decoded at a time: the norm of a large model is summed in pieces of 16 MiB, not beside a copy of the whole.
CHUNK_VALUES = 2**22


class PayloadFault(Exception):
    """Why a payload does not count. `reason` is the word that goes into the manifest: header | shape | not_finite."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """A payload that passed: its header and the Euclidean norm of what it decodes to."""

    header: PayloadHeader
    norm: float


def body_bytes(codec: str, numel: int, block: int) -> int:
    """Bytes of a body, in integers of any size."""
    blocks = -(-numel // block)
    return {"fp32": 4 * numel, "bf16": 2 * numel, "int8": blocks * (2 + block), "int4": blocks * (2 + block // 2)}[
        codec
    ]


def split(payload: bytes) -> tuple[PayloadHeader, memoryview]:
    """Header and body, proved consistent with each other."""
    start = len(PAYLOAD_MAGIC) + 4
    view = memoryview(payload)
    if len(view) < start or view[: len(PAYLOAD_MAGIC)] != PAYLOAD_MAGIC:
        raise PayloadFault("header", "not a payload of this protocol")
    (length,) = struct.unpack("<I", view[len(PAYLOAD_MAGIC) : start])
    if length > PAYLOAD_HEADER_MAX_BYTES or start + length > len(view):
        raise PayloadFault("header", f"a header of {length} bytes does not fit")
    try:
        header = msgspec.json.decode(view[start : start + length], type=PayloadHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PayloadFault("header", f"the header cannot be read: {error}") from error
    if not 2 <= header.block <= CODEC_BLOCK_MAX or header.block % 2:
        raise PayloadFault("header", f"a block of {header.block} values is not supported")
    if header.numel < 1 or header.tokens < 0 or header.round < 0:
        raise PayloadFault("header", "a count in the header is out of range")
    body = view[start + length :]
    if len(body) != body_bytes(header.codec, header.numel, header.block):
        raise PayloadFault("shape", f"{len(body)} bytes do not hold {header.numel} values of {header.codec}")
    return header, body


def inspect(payload: bytes, *, numel: int, layout_digest: str) -> Reading:
    """Check a payload by itself: shape against the job's model, finiteness, and measure its norm."""
    header, body = split(payload)
    if header.numel != numel or header.layout_digest != layout_digest:
        raise PayloadFault("shape", "the payload's parameters are not those of the job's model")
    with np.errstate(invalid="ignore", over="ignore"):
        square = _square_of_body(header, body)
    if not math.isfinite(square):
        raise PayloadFault("not_finite", "the payload has values that are not finite")
    return Reading(header, math.sqrt(square))


def _square_of_body(header: PayloadHeader, body: memoryview) -> float:
    """Sum of the squares of all values in double precision; not finite if any value is not."""
    if header.codec == "fp32":
        return _sum_of_squares(np.frombuffer(body, dtype="<f4"))
    if header.codec == "bf16":
        halves = np.frombuffer(body, dtype="<u2")
        # A bf16 is the upper half of an fp32.
        pieces = range(0, halves.size, CHUNK_VALUES)
        return sum(
            _sum_of_squares((halves[at : at + CHUNK_VALUES].astype(np.uint32) << 16).view(np.float32)) for at in pieces
        )
    blocks = -(-header.numel // header.block)
    scales = np.frombuffer(body[: 2 * blocks], dtype="<f2").astype(np.float64)
    return _square_of_blocks(header, scales, body[2 * blocks :])


def _square_of_blocks(header: PayloadHeader, scales: NDArray[np.float64], codes: memoryview) -> float:
    """Blocks decode to scale * code, so a block's square is scale squared times the square of its codes."""
    per_block = header.block if header.codec == "int8" else header.block // 2
    rows = max(1, CHUNK_VALUES // header.block)
    total = 0.0
    for at in range(0, scales.size, rows):
        raw = np.frombuffer(codes[at * per_block : (at + rows) * per_block], dtype=np.uint8).reshape(-1, per_block)
        squares = _INT8_SQUARES[raw] if header.codec == "int8" else _INT4_PAIR_SQUARES[raw]
        padding = (scales.size * header.block - header.numel) if at + rows >= scales.size else 0
        if padding and _has_padding(header, raw[-1], padding):
            raise PayloadFault("shape", "the padding after the last value is not zero")
        total += float(np.sum(squares.sum(axis=1, dtype=np.float64) * np.square(scales[at : at + rows])))
    return total


def _has_padding(header: PayloadHeader, last_block: NDArray[np.uint8], padding: int) -> bool:
    if header.codec == "int8":
        return bool(last_block[header.block - padding :].any())
    codes = np.stack([last_block & 0x0F, last_block >> 4], axis=1).reshape(-1)
    return bool(codes[header.block - padding :].any())


def _sum_of_squares(values: NDArray[np.float32]) -> float:
    return sum(
        float(np.sum(np.square(values[at : at + CHUNK_VALUES].astype(np.float64))))
        for at in range(0, values.size, CHUNK_VALUES)
    )


_SIGNED = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int64)
_INT8_SQUARES = np.square(_SIGNED).astype(np.uint16)
_NIBBLE = np.array([n - 16 if n > 7 else n for n in range(16)], dtype=np.int64)
_INT4_PAIR_SQUARES = np.array([_NIBBLE[b & 15] ** 2 + _NIBBLE[b >> 4] ** 2 for b in range(256)], dtype=np.uint16)
