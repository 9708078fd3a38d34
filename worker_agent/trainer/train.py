"""Train with no marketplace: a coordinator and n learners in this process, by the same code that runs across islands.

As a library: `train(run, learners=4)`. On the command line (also as `archipelago-agent train`): `main(argv)`, which
prints one line a round. Invariant: with nobody late and nobody lost, a seed gives one result, bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec
import torch

from worker_agent.protocol import (
    EXIT_DONE,
    EXIT_ERROR,
    BuiltinData,
    FilesData,
    GptModel,
    InnerSpec,
    ModuleModel,
    OuterSpec,
    RunSpec,
    SyncSpec,
)
from worker_agent.trainer.assemble import assemble
from worker_agent.trainer.distributed import Group
from worker_agent.trainer.errors import TrainerError
from worker_agent.trainer.exchange_local import LocalCoordinator, RoundRecord, StepsFor
from worker_agent.trainer.inner import ComputeOptions
from worker_agent.trainer.learner import Learner
from worker_agent.trainer.state import OuterState, save_snapshot

_A_DAY_MS = 86_400_000

# Under a minute on two cores: small steps and a short context teach a small model most for its tokens.
DEFAULT_MODEL = GptModel(n_layer=2, n_head=4, d_model=64, context=64)
DEFAULT_RUN = RunSpec(
    job_id="alone",
    seed=1,
    model=DEFAULT_MODEL,
    data=BuiltinData(),
    tokens=1_500_000,
    batch_tokens=1024,
    sync=SyncSpec(inner_steps=40),
)


@dataclass(frozen=True)
class TrainResult:
    """`heldout_bits_per_byte` by state round: 0 is the model as initialised."""

    state: OuterState
    records: list[RoundRecord]
    heldout_bits_per_byte: dict[int, float]
    tokens: int
    bytes_sent_per_learner: float
    seconds: float

    @property
    def first_bits(self) -> float:
        return self.heldout_bits_per_byte[0]

    @property
    def final_bits(self) -> float:
        return self.heldout_bits_per_byte[max(self.heldout_bits_per_byte)]


def train(
    run: RunSpec,
    *,
    learners: int = 1,
    at_once: int | None = None,
    workdir: Path | None = None,
    options: ComputeOptions | None = None,
    evaluate_every: int = 1,
    steps_for: StepsFor | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> TrainResult:
    """Train `run` to its budget of tokens. `at_once` learners compute at a time (default: as many as there are cores
    for).

    Nobody is ever late here: learners take turns on one machine, so a deadline would measure the machine and not
    them."""
    if learners < 1:
        raise ValueError("learners must be at least 1")
    run = msgspec.structs.replace(
        run,
        threads=run.threads or 1,
        sync=msgspec.structs.replace(run.sync, quorum=1.0, round_deadline_ms=_A_DAY_MS, grace_ms=_A_DAY_MS),
    )
    with ExitStack() as stack:
        folder = workdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-train-")))
        coordinator = LocalCoordinator(
            run,
            folder / "store",
            expected=learners,
            steps_for=steps_for,
            evaluate_every=evaluate_every,
            on_round=on_round,
        )
        gate = threading.Semaphore(at_once or min(learners, os.cpu_count() or 1))
        started = time.monotonic()
        states = _run_learners(coordinator, learners, folder, gate, options or ComputeOptions())
        seconds = time.monotonic() - started
        sent = sum(record.bytes_sent for record in coordinator.records)
        return TrainResult(
            state=states[0],
            records=coordinator.records,
            heldout_bits_per_byte=dict(sorted(coordinator.heldout.items())),
            tokens=coordinator.tokens,
            bytes_sent_per_learner=sent / learners,
            seconds=seconds,
        )


def _run_learners(
    coordinator: LocalCoordinator, count: int, folder: Path, gate: threading.Semaphore, options: ComputeOptions
) -> list[OuterState]:
    """A thread each. The first failure stops the others at their next step and is raised here."""
    stop = threading.Event()
    failures: list[BaseException] = []
    learners: list[Learner] = []
    for index in range(count):
        member_id = f"learner-{index:03d}"
        home = folder / member_id
        home.mkdir(parents=True, exist_ok=True)
        exchange = coordinator.admit(member_id)

        build = partial(assemble, exchange=exchange, workdir=home, group=Group(), options=options)
        learners.append(Learner(exchange, build, home, stop=stop, gate=gate))

    def serve(learner: Learner) -> None:
        try:
            learner.run()
        except BaseException as error:  # handed to the caller's thread, which raises it
            failures.append(error)
            stop.set()
            for other in learners:
                other.exchange.interrupt()

    threads = [
        threading.Thread(target=serve, args=(learner,), name=f"learner-{i}") for i, learner in enumerate(learners)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stop.set()
        for learner in learners:
            learner.exchange.interrupt()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return [learner.state for learner in learners if learner.state is not None]


# ------------------------------------------------------------------------------------------------------ command line


def main(argv: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    out = out or sys.stdout
    options = _parser().parse_args(argv)
    run = _run_from(options)
    printer = _Printer(out, run, options.learners, as_json=options.json)
    try:
        printer.begin()
        result = train(
            run,
            learners=options.learners,
            options=ComputeOptions(device=options.device),
            on_round=printer.round,
        )
    except TrainerError as error:
        print(f"archipelago train: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("archipelago train: interrupted", file=sys.stderr)
        return 130
    if options.save is not None:
        save_snapshot(result.state, options.save, job_id=run.job_id)
    printer.end(result, options.save)
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    run, gpt, inner, outer, sync = DEFAULT_RUN, DEFAULT_MODEL, InnerSpec(), OuterSpec(), DEFAULT_RUN.sync
    parser = argparse.ArgumentParser(
        prog="archipelago-agent train",
        description="Train by DiLoCo with several learners on this machine: the code that trains across islands.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--run", type=Path, help="a run specification as JSON; the options below are then not used", default=None
    )
    parser.add_argument("--learners", type=int, default=4, help="members of the run")
    parser.add_argument("--tokens", type=int, default=run.tokens, help="training tokens, all learners together")
    parser.add_argument(
        "--batch-tokens", type=int, default=run.batch_tokens, help="tokens of one inner step of one learner"
    )
    parser.add_argument(
        "--inner-steps", type=int, default=run.sync.inner_steps, help="inner steps between two exchanges"
    )
    parser.add_argument("--seed", type=int, default=run.seed)
    parser.add_argument("--layers", type=int, default=gpt.n_layer)
    parser.add_argument("--heads", type=int, default=gpt.n_head)
    parser.add_argument("--width", type=int, default=gpt.d_model)
    parser.add_argument("--context", type=int, default=gpt.context)
    parser.add_argument("--model", help="a model of your own, `module:function`", default=None)
    parser.add_argument(
        "--data", help="a file or folder to train on; without it, the Python standard library's sources", default=None
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default=inner.optimizer)
    parser.add_argument("--lr", type=float, default=inner.lr)
    parser.add_argument("--outer-lr", type=float, default=outer.lr)
    parser.add_argument("--outer-momentum", type=float, default=outer.momentum)
    parser.add_argument("--codec", choices=("fp32", "bf16", "int8", "int4"), default=sync.codec)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--save", type=Path, help="write the final state here, as safetensors", default=None)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of words")
    return parser


def _run_from(options: argparse.Namespace) -> RunSpec:
    if options.run is not None:
        return msgspec.json.decode(options.run.read_bytes(), type=RunSpec)
    model: GptModel | ModuleModel = GptModel(
        n_layer=options.layers, n_head=options.heads, d_model=options.width, context=options.context
    )
    if options.model is not None:
        model = ModuleModel(entry=options.model, context=options.context)
    return msgspec.structs.replace(
        DEFAULT_RUN,
        seed=options.seed,
        model=model,
        data=BuiltinData() if options.data is None else FilesData(path=options.data),
        tokens=options.tokens,
        batch_tokens=options.batch_tokens,
        inner=InnerSpec(optimizer=options.optimizer, lr=options.lr),
        outer=OuterSpec(lr=options.outer_lr, momentum=options.outer_momentum),
        sync=SyncSpec(inner_steps=options.inner_steps, codec=options.codec),
    )


class _Printer:
    """One line a round, for people or for programs."""

    def __init__(self, out: TextIO, run: RunSpec, learners: int, *, as_json: bool) -> None:
        self._out = out
        self._run = run
        self._learners = learners
        self._as_json = as_json
        self._started = time.monotonic()

    def begin(self) -> None:
        if self._as_json:
            self._line({"event": "begin", "run": msgspec.to_builtins(self._run), "learners": self._learners})
            return
        sync = self._run.sync
        print(
            f"{self._learners} learners, {sync.inner_steps} inner steps a round, {sync.codec} exchange, "
            f"{self._run.tokens:,} tokens, torch {torch.__version__}",
            file=self._out,
        )
        print("round   tokens         loss  held-out     sent    time   state", file=self._out, flush=True)

    def round(self, record: RoundRecord) -> None:
        seconds = time.monotonic() - self._started
        if self._as_json:
            self._line({"event": "round", "seconds": round(seconds, 3), **msgspec.to_builtins(record)})
            return
        bits = record.heldout_bits_per_byte
        print(
            f"{record.round:>5}  {record.tokens_after:>9,}  {record.train_loss_nats / math.log(2):>6.3f} b  "
            f"{'' if bits is None else format(bits, '.3f'):>6} b  {record.bytes_sent / 1e6:>5.2f} MB  "
            f"{seconds:>5.1f} s  {(record.state_digest or '')[:12]}",
            file=self._out,
            flush=True,
        )

    def end(self, result: TrainResult, saved: Path | None) -> None:
        summary = {
            "event": "end",
            "rounds": len(result.records),
            "tokens": result.tokens,
            "heldout_bits_per_byte_before": result.first_bits,
            "heldout_bits_per_byte": result.final_bits,
            "bytes_sent_per_learner": result.bytes_sent_per_learner,
            "seconds": result.seconds,
            "state_digest": result.state.digest(),
        }
        if self._as_json:
            self._line(summary)
            return
        print(
            f"\nheld-out bits per byte {result.first_bits:.3f} -> {result.final_bits:.3f} after {result.tokens:,} "
            f"tokens in {len(result.records)} rounds, {result.seconds:.1f} s; "
            f"{result.bytes_sent_per_learner / 1e6:.2f} MB sent by each learner",
            file=self._out,
        )
        if saved is not None:
            print(f"final state: {saved}", file=self._out)

    def _line(self, record: dict[str, object]) -> None:
        print(msgspec.json.encode(record).decode(), file=self._out, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
