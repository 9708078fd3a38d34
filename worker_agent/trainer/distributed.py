"""Several processes of one island: plain data parallel over torch.distributed (gloo on CPUs, nccl on GPUs).

Invariant: only rank 0 talks to the outside. It announces every order to the other ranks, so all of them make the same
calls in the same sequence; and a step's gradient is the mean over the whole batch, whatever the number of ranks it is
spread over.

Ranks come from torchrun-style variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) where they are set.
Otherwise, with nproc > 1, rank 0 starts the others itself on this machine, meeting through a file in the work
directory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_PR_SET_PDEATHSIG = 1
_RANK_VARIABLE = "ARCHIPELAGO_RANK"
_RENDEZVOUS_VARIABLE = "ARCHIPELAGO_RENDEZVOUS"


@dataclass(frozen=True)
class Group:
    """This process's place among the processes of its island. With one process every call is a no-op."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def announce(self, message: bytes | None = None) -> bytes:
        """Rank 0 passes bytes to all; the others call it without and get them."""
        if self.size == 1:
            return message or b""
        box = [message]
        dist.broadcast_object_list(box, src=0)
        received = box[0]
        if received is None:
            raise RuntimeError("rank 0 announced nothing")
        return received

    def agree(self, decision: bool) -> bool:
        """Rank 0's decision, on all ranks; cheap enough for once a step."""
        if self.size == 1:
            return decision
        flag = torch.tensor([int(decision)], dtype=torch.int32, device=_collective_device())
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def share(self, flat: Tensor) -> None:
        """Rank 0's vector into everyone's, in place."""
        if self.size > 1:
            device = _collective_device()
            moved = flat.to(device)
            dist.broadcast(moved, src=0)
            if device.type != "cpu":
                flat.copy_(moved)

    def sum(self, tensors: list[Tensor]) -> None:
        """Add each tensor up over the ranks, in place, in one message."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()

    def part(self) -> None:
        """Meet once more before the group is closed: a rank whose peer is gone already may abort in gloo's
        destructor."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def place_of_this_process(nproc: int) -> Group:
    """Who this process is, before anything is joined."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = int(os.environ["RANK"])
        return Group(rank=rank, size=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    rank = int(os.environ.get(_RANK_VARIABLE, "0"))
    return Group(rank=rank, size=nproc, local_rank=rank)


def join_group(group: Group, rendezvous: Path, *, cuda: bool) -> None:
    """Block until all ranks are there."""
    if group.size == 1:
        return
    if cuda:
        torch.cuda.set_device(group.local_rank)
    method = "env://" if "MASTER_ADDR" in os.environ else f"file://{rendezvous.resolve()}"
    if method != "env://" and not cuda:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no reason to be on the network
    dist.init_process_group("nccl" if cuda else "gloo", init_method=method, rank=group.rank, world_size=group.size)


def rendezvous_of_this_process() -> Path:
    return Path(os.environ.get(_RENDEZVOUS_VARIABLE, "unused under torchrun"))


def start_followers(group: Group, config: Path, rendezvous: Path) -> list[subprocess.Popen[bytes]]:
    """Start ranks 1.. with this process's own configuration. Nothing to do for a single process or under torchrun."""
    if group.size == 1 or not group.is_lead or "RANK" in os.environ:
        return []
    command = [sys.executable, "-m", "worker_agent.trainer", "--config", str(config)]
    shared = {**os.environ, _RENDEZVOUS_VARIABLE: str(rendezvous.resolve())}
    return [
        subprocess.Popen(command, env={**shared, _RANK_VARIABLE: str(rank)}, stdin=subprocess.DEVNULL)
        for rank in range(1, group.size)
    ]


def end_followers(followers: list[subprocess.Popen[bytes]], patience_s: float = 10.0) -> None:
    """They end by themselves once told; one that does not is killed, so that no GPU stays held."""
    for follower in followers:
        try:
            follower.wait(patience_s)
        except subprocess.TimeoutExpired:
            follower.kill()
            follower.wait()


def tie_to_lead(group: Group) -> None:
    """A follower ignores the signals that ask for a drain (rank 0 passes the order on) and dies with rank 0."""
    if group.is_lead:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux" and _RANK_VARIABLE in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _collective_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
