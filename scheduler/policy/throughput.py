"""How fast a job trains on a set of islands, and whether it fits: the one formula for speed.

Method: step time 6*N*b / (MFU * peak * n) (dense transformer FLOPs, Kaplan et al. 2020, section 2.1); the exchange is
a fan-out through the store, slowest up-link plus slowest down-link; replicas lose statistical efficiency by a power
law fitted to Charles et al., "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling
Laws for DiLoCo" (arXiv 2503.09799), table 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.policy.state import Gpu

# Sharded over an island: weights 2, gradients 2, fp32 master 4, AdamW 8, outer anchor and momentum 8.
BYTES_PER_PARAMETER = 24
USABLE_MEMORY = 0.92
OVERHEAD_BYTES = 4e9
GIB = 2**30
# Loss falls with compute as C**-LOSS_EXPONENT; an increase in loss converts into compute through it.
LOSS_EXPONENT = 0.04925
# The fit is not carried below the sizes it was made from: there it would forbid a second island altogether.
SMALLEST_FITTED_PARAMETERS = 10**8
# A link nobody stated is taken as this: slow enough not to flatter the island.
ASSUMED_MBPS = 100.0


@dataclass(frozen=True)
class Replica:
    """One island's part in a job: its own speed when it needs to wait for nobody, and its links."""

    tokens_per_s: float
    up_mbps: float | None = None
    down_mbps: float | None = None


def model_tokens_per_s(gpu: Gpu, gpus: int, parameters: int) -> float:
    """Tokens per second of `gpus` GPUs by the FLOPs of a dense model of `parameters`; no WAN in it."""
    return gpu.mfu * gpu.bf16_dense_tflops * 1e12 * gpus / (6 * parameters)


def fits_memory(gpu: Gpu, gpus: int, parameters: int) -> bool:
    """Whether the state of a model shards over the island: 24 bytes a parameter and 4 GB a GPU, in 92 % of memory."""
    if parameters < 1 or gpus < 1:
        raise ValueError("parameters and gpus must be positive")
    return parameters * BYTES_PER_PARAMETER / gpus + OVERHEAD_BYTES <= gpu.vram_gib * GIB * USABLE_MEMORY


def replica_efficiency(replicas: int, parameters: int, inner_steps: int) -> float:
    """Share of the tokens that count once `replicas` islands average every `inner_steps`: 1 for a single one."""
    if replicas <= 1:
        return 1.0
    size = float(max(parameters, SMALLEST_FITTED_PARAMETERS))
    beta = 1.0923 * size**-0.2342 * math.log(max(inner_steps, 2)) / math.log(30)
    return float(replicas ** (-beta / LOSS_EXPONENT))


def exchange_s(replicas: Sequence[Replica], parameters: int, bits_per_parameter: float) -> float:
    """Seconds of one exchange by fan-out: everyone sends its payload and reads those of all others."""
    others = len(replicas) - 1
    if others < 1:
        return 0.0
    payload_bits = parameters * bits_per_parameter
    up = max(payload_bits / ((r.up_mbps or ASSUMED_MBPS) * 1e6) for r in replicas)
    down = max(others * payload_bits / ((r.down_mbps or ASSUMED_MBPS) * 1e6) for r in replicas)
    return up + down


def effective_tokens_per_s(
    replicas: Sequence[Replica], *, parameters: int, batch_tokens: int, inner_steps: int, bits_per_parameter: float
) -> float:
    """Tokens per second that count, of all islands together, the exchange not overlapped with compute.

    The round lasts as long as the island of median speed needs for `inner_steps`; each does what it can in that time.
    """
    if not replicas:
        return 0.0
    speeds = sorted(r.tokens_per_s for r in replicas)
    round_compute_s = inner_steps * batch_tokens / speeds[len(speeds) // 2]
    tokens = sum(max(1, int(round_compute_s * speed / batch_tokens + 1e-9)) * batch_tokens for speed in speeds)
    round_s = max(round_compute_s, batch_tokens / speeds[0]) + exchange_s(replicas, parameters, bits_per_parameter)
    return tokens / round_s * replica_efficiency(len(replicas), parameters, inner_steps)
