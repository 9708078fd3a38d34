"""One island's own work: H inner steps on its shard, and the held-out evaluation.

Invariant: the parameters are identical on all processes of the island before and after every call. Calls are made on
rank 0; `follow` mirrors them on the others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from worker_agent.protocol import RoundOrder, RunSpec
from worker_agent.trainer.data import Corpus
from worker_agent.trainer.distributed import Group
from worker_agent.trainer.errors import SpecError
from worker_agent.trainer.layout import Layout
from worker_agent.trainer.model import LoadedModel
from worker_agent.trainer.optim import InnerOptimizer
from worker_agent.trainer.shards import Shard

_EVALUATION_TOKENS_PER_BATCH = 8_192  # more does not fit a core's cache and is slower


class ComputeOptions(msgspec.Struct, kw_only=True, frozen=True):
    """How this island computes; nothing here changes what the run is."""

    device: str = "auto"  # auto | cpu | cuda | cuda:N
    compile: bool = False  # torch.compile, CUDA only
    autocast_bf16: bool = True  # CUDA only: on a CPU it is emulated and slow
    micro_windows: int | None = None  # windows per forward pass on one process; None: the whole step at once


@dataclass(frozen=True)
class Progress:
    steps: int
    tokens: int
    loss_nats: float | None  # of the latest step
    step_ms: int | None  # median so far


@dataclass(frozen=True)
class RoundWork:
    """What came of one order. `loss_nats` is the mean over its tokens, None where there were none."""

    steps: int
    tokens: int
    loss_nats: float | None
    compute_ms: int
    step_ms: int | None


Continue = Callable[[Progress], bool]


class _Message(msgspec.Struct):
    """What rank 0 announces."""

    call: str  # load | train | evaluate | stop
    order: RoundOrder | None = None


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        wanted = f"cuda:{local_rank}"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise SpecError("device", f"{wanted} was asked for and torch sees no GPU here")
    return torch.device(wanted)


class Island:
    """The model, the optimiser and the data of one member, on all its processes."""

    def __init__(
        self,
        run: RunSpec,
        loaded: LoadedModel,
        corpus: Corpus,
        *,
        group: Group | None = None,
        options: ComputeOptions | None = None,
    ) -> None:
        self.run = run
        self.group = group or Group()
        self.options = options or ComputeOptions()
        self.corpus = corpus
        self.context = loaded.context
        self.windows_per_step = run.batch_tokens // loaded.context
        if self.windows_per_step < self.group.size:
            raise SpecError("batch_tokens", f"{run.batch_tokens} tokens are less than one window for each process")
        self.layout = Layout.of(loaded.model)
        self.initial = self.layout.flatten_model(loaded.model)
        self.device = choose_device(self.options.device, self.group.local_rank)
        self.model = loaded.model.to(self.device)
        self._loss = loaded.loss
        on_gpu = self.device.type == "cuda"
        if self.options.compile and on_gpu:
            self.model.compile()  # in place: the parameters keep their names
        self._autocast = self.options.autocast_bf16 and on_gpu
        self.optimizer = InnerOptimizer(self.model, run.inner, tokens_total=run.tokens)

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.context

    @property
    def evaluated_bytes(self) -> int:
        """Held-out bytes that `evaluate` predicts: whole windows of what was asked for and is there."""
        return max(1, min(self.run.eval_bytes, self.corpus.heldout.numel() - 1) // self.context) * self.context

    def load(self, flat: Tensor) -> None:
        """Set the parameters of all processes. The optimiser's state stays: it is this member's view of the terrain."""
        self._announce(_Message("load"))
        self._load(flat)

    def parameters(self) -> Tensor:
        """The parameters now, as a new flat vector on the CPU."""
        return self.layout.flatten_model(self.model)

    def train(self, order: RoundOrder, go_on: Continue) -> RoundWork:
        """Up to `order.steps` steps; `go_on` is asked before each of them and after the last."""
        self._announce(_Message("train", order))
        return self._train(order, go_on)

    def evaluate(self) -> float:
        """Held-out bits per byte (per token, where tokens are not bytes) of the parameters now."""
        self._announce(_Message("evaluate"))
        return self._evaluate()

    def stop(self) -> None:
        """Let the other processes of the island end."""
        self._announce(_Message("stop"))
        self.group.part()

    def follow(self) -> None:
        """Ranks other than 0: do as announced until told to stop."""
        while True:
            message = msgspec.json.decode(self.group.announce(), type=_Message)
            if message.call == "load":
                self._load(torch.empty(self.layout.numel, dtype=torch.float32))
            elif message.call == "train" and message.order is not None:
                self._train(message.order, _always)
            elif message.call == "evaluate":
                self._evaluate()
            else:
                self.group.part()
                return

    def _announce(self, message: _Message) -> None:
        if self.group.size > 1:
            self.group.announce(msgspec.json.encode(message))

    def _load(self, flat: Tensor) -> None:
        self.group.share(flat)
        self.layout.load_into(self.model, flat)

    def _train(self, order: RoundOrder, go_on: Continue) -> RoundWork:
        shard = Shard.of(
            order,
            seed=self.run.seed,
            windows=self.corpus.windows,
            windows_per_step=self.windows_per_step,
            context=self.context,
        )
        self.model.train()
        started = time.perf_counter()
        step_times: list[float] = []
        losses: list[float] = []
        for step in range(order.steps):
            progress = self._progress(losses, step_times)
            if not self.group.agree(self.group.is_lead and go_on(progress)):
                break
            step_started = time.perf_counter()
            # The position in the schedule counts what the other slots of the round are doing meanwhile.
            position = order.tokens_before + step * self.tokens_per_step * max(1, order.data_slots)
            loss = self._step(shard, step, position)
            if loss is not None:
                losses.append(loss)
            step_times.append(time.perf_counter() - step_started)
        if self.group.is_lead:
            go_on(self._progress(losses, step_times))
        return RoundWork(
            steps=len(losses),
            tokens=len(losses) * self.tokens_per_step,
            loss_nats=statistics.fmean(losses) if losses else None,
            compute_ms=round((time.perf_counter() - started) * 1000),
            step_ms=_median_ms(step_times),
        )

    def _step(self, shard: Shard, step: int, position: int) -> float | None:
        """One step on this process's part of the batch. None where the gradient was not finite and the step was
        undone."""
        mine = shard.windows_of(step)[self.group.rank :: self.group.size]
        inputs_BT, targets_BT = self.corpus.batch(mine)
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        size = self.options.micro_windows or len(mine)
        total = torch.zeros((), device=self.device)
        for x_BT, y_BT in zip(inputs_BT.split(size), targets_BT.split(size), strict=True):
            share = len(x_BT) / self.windows_per_step
            with self._precision():
                loss = self._loss(self.model, self._moved(x_BT), self._moved(y_BT)) * share
            loss.backward()
            total += loss.detach()
        gradients = [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]
        self.group.sum([*gradients, total])
        mean = float(total)
        stepped = math.isfinite(mean) and self.optimizer.step(position)
        return mean if stepped else None

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.model.eval()
        nats = torch.zeros(2, dtype=torch.float64)
        windows = max(1, _EVALUATION_TOKENS_PER_BATCH // self.context)
        batches = self.corpus.heldout_batches(self.run.eval_bytes, windows)
        for index, (x_BT, y_BT) in enumerate(batches):
            if index % self.group.size != self.group.rank:
                continue
            with self._precision():
                loss = self._loss(self.model, self._moved(x_BT), self._moved(y_BT))
            nats += torch.tensor([float(loss) * y_BT.numel(), y_BT.numel()], dtype=torch.float64)
        nats = nats.to(self.device if self.group.size > 1 else "cpu")
        self.group.sum([nats])
        total, count = nats.tolist()
        return total / count / math.log(2)

    def _progress(self, losses: list[float], step_times: list[float]) -> Progress:
        return Progress(
            steps=len(losses),
            tokens=len(losses) * self.tokens_per_step,
            loss_nats=losses[-1] if losses else None,
            step_ms=_median_ms(step_times),
        )

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._autocast else nullcontext()

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _median_ms(times: list[float]) -> int | None:
    return round(statistics.median(times) * 1000) if times else None


def _always(_progress: Progress) -> bool:
    return True
