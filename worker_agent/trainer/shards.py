"""Which window of the text is read at which place of the run: a permutation of all windows, one per epoch.

Invariant: places p of one epoch (p // windows equal) map to different windows, for any seed and any number of
windows. The places themselves are handed out once: as ranges of a single counter (RoundOrder.data_start), or, where
the coordinator keeps none, interleaved by slot from the round's first token. So no loader has any state to lose or to
share, and a member that joins late, leaves, or is slower than the others cannot make another one read a window again.

The permutation is a Feistel network over the next even power of two with cycle walking: no table, any size, and the
same on every version of every library, which a shuffled list is not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_agent.protocol import RoundOrder

_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_AGAIN = np.uint64(0xBF58476D1CE4E5B9)

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of range(size)."""

    size: int
    half_bits: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, size: int, key: str) -> Permutation:
        digest = hashlib.sha512(key.encode()).digest()
        keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
        return cls(size=size, half_bits=max(1, ((size - 1).bit_length() + 1) // 2), keys=keys)

    def __call__(self, places: Indices) -> Indices:
        """Walk each place along its cycle until it falls inside: the network permutes a domain below four times the
        size."""
        if places.size and (places.min() < 0 or places.max() >= self.size):
            raise IndexError(f"a place is outside 0..{self.size - 1}")
        values = self._network(places.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> half, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right, np.uint64(key)) & mask)
        return (left << half) | right


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Multiplications modulo 2**64 on arrays, where wrapping round is meant and silent."""
    mixed = (values + key) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX_AGAIN
    return mixed ^ (mixed >> np.uint64(29))


@dataclass(frozen=True)
class Shard:
    """The windows of one order: `windows_of(step)` for step 0, 1, 2..."""

    seed: int
    windows: int  # in the text
    windows_per_step: int
    first: int  # place of the order's first window
    stride: int  # between consecutive windows of this order
    stop: int | None  # places beyond the order's own range belong to somebody else

    @classmethod
    def of(cls, order: RoundOrder, *, seed: int, windows: int, windows_per_step: int, context: int) -> Shard:
        if order.data_start is not None:
            first = order.data_start // context
            return cls(seed, windows, windows_per_step, first, 1, first + order.steps * windows_per_step)
        slots = max(1, order.data_slots)
        return cls(seed, windows, windows_per_step, order.tokens_before // context + order.data_slot, slots, None)

    def windows_of(self, step: int) -> Indices:
        steps = np.arange(step * self.windows_per_step, (step + 1) * self.windows_per_step, dtype=np.int64)
        places = self.first + steps * self.stride
        if self.stop is not None and places[-1] >= self.stop:
            raise IndexError(f"step {step} is beyond the order's range of the data")
        return window_at(places, seed=self.seed, windows=self.windows)


def window_at(places: Indices, *, seed: int, windows: int) -> Indices:
    """The windows at these places of the run; a step may straddle two epochs."""
    epochs = places // windows
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = Permutation.of(windows, f"{seed}/{epoch}")(places[here] % windows)
    return found
