"""One member of a job as a process of its own: `python -m worker_agent.trainer --config run.json`.

The agent starts and watches it. The configuration is a file readable by its owner only, because it holds the member's
token: an argument or a variable would show in the process list. SIGTERM and SIGINT drain: what is worth submitting is
submitted, then the member leaves.

Exit codes: 0 finished, stopped or drained; 1 error; 3 another process has taken this member's place; 4 the assignment
has ended; 5 the coordinator did not answer for as long as `patience_s`. What `workdir/status.json` holds (see
status.py) goes to stderr in words too.

torch is imported only once the configuration has been read: a process that is to fail should fail at once.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from worker_agent.protocol import EXIT_DONE, EXIT_ERROR
from worker_agent.trainer.errors import TrainerError
from worker_agent.trainer.status import Status, StatusFile

if TYPE_CHECKING:
    from worker_agent.trainer.distributed import Group
    from worker_agent.trainer.inner import ComputeOptions


class TrainerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the agent writes for the process it starts. `coordinator_url` is the control plane's address, with or
    without the path of its agent API."""

    coordinator_url: str
    member_token: str
    generation: int
    workdir: str
    nproc: int = 1
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    patience_s: float = 120.0
    compile: bool = False
    autocast_bf16: bool = True
    micro_windows: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker_agent.trainer", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see TrainerConfig; mode 0600")
    path: Path = parser.parse_args(argv).config
    try:
        config = read_config(path)
    except (OSError, msgspec.DecodeError) as error:
        print(f"trainer: the configuration {path} cannot be read: {error}", file=sys.stderr)
        return EXIT_ERROR
    return run_member(config, path)


def read_config(path: Path) -> TrainerConfig:
    if path.stat().st_mode & 0o077:
        print(f"trainer: {path} holds a token and is readable by others; it should have mode 0600", file=sys.stderr)
    config = msgspec.json.decode(path.read_bytes(), type=TrainerConfig)
    Path(config.workdir).mkdir(parents=True, exist_ok=True)
    return config


def run_member(config: TrainerConfig, path: Path) -> int:
    """Serve to the end and turn what happened into an exit code. Everything that ends the process passes here."""
    workdir = Path(config.workdir)
    stop = threading.Event()
    status = StatusFile(workdir, echo=_say)
    status.write("starting")

    from worker_agent.trainer import distributed  # imports torch: not before the first status is written

    group = distributed.place_of_this_process(config.nproc)
    distributed.tie_to_lead(group)
    if not group.is_lead:
        return _follow(config, group)

    from worker_agent.trainer.assemble import assemble
    from worker_agent.trainer.exchange_http import HttpExchange
    from worker_agent.trainer.inner import choose_device
    from worker_agent.trainer.learner import Learner

    exchange = HttpExchange(
        config.coordinator_url,
        config.member_token,
        generation=config.generation,
        instance=secrets.token_hex(8),
        patience_s=config.patience_s,
    )

    def drain(_signal: int, _frame: FrameType | None) -> None:
        stop.set()
        exchange.interrupt()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    rendezvous = workdir / f"rendezvous-{exchange.instance}"
    followers = []
    try:
        options = _options(config)
        cuda = choose_device(config.device).type == "cuda"
        followers = distributed.start_followers(group, path, rendezvous)
        distributed.join_group(group, rendezvous, cuda=cuda)
        learner = Learner(
            exchange,
            lambda run: assemble(run, exchange, workdir, group, options),
            workdir,
            status=status,
            stop=stop,
        )
        outcome = learner.run()
        status.write("done", message=outcome, exit_code=EXIT_DONE)
        return EXIT_DONE
    except TrainerError as error:
        status.write("failed", message=f"{type(error).__name__}: {error}", exit_code=error.exit_code)
        return error.exit_code
    except Exception as error:  # the status file is how the agent learns why; the traceback goes to stderr as ever
        status.write("failed", message=f"{type(error).__name__}: {error}", exit_code=EXIT_ERROR)
        raise
    finally:
        distributed.end_followers(followers)
        group.close()
        exchange.close()
        rendezvous.unlink(missing_ok=True)


def _follow(config: TrainerConfig, group: Group) -> int:
    from worker_agent.trainer import distributed
    from worker_agent.trainer.assemble import assemble_follower
    from worker_agent.trainer.inner import choose_device

    cuda = choose_device(config.device, group.local_rank).type == "cuda"
    distributed.join_group(group, distributed.rendezvous_of_this_process(), cuda=cuda)
    try:
        assemble_follower(Path(config.workdir), group, _options(config)).follow()
    finally:
        group.close()
    return EXIT_DONE


def _options(config: TrainerConfig) -> ComputeOptions:
    from worker_agent.trainer.inner import ComputeOptions

    return ComputeOptions(
        device=config.device,
        compile=config.compile,
        autocast_bf16=config.autocast_bf16,
        micro_windows=config.micro_windows,
    )


def _say(status: Status) -> None:
    """The log the agent keeps the tail of."""
    parts: list[str] = [status.state]
    if status.round is not None:
        parts.append(f"round {status.round}")
    if status.step is not None:
        parts.append(f"step {status.step}/{status.steps}")
    if status.loss_nats is not None:
        parts.append(f"loss {status.loss_nats:.3f} nats")
    if status.heldout_bits_per_byte is not None:
        parts.append(f"held-out {status.heldout_bits_per_byte:.3f} bits per byte")
    if status.message:
        parts.append(status.message)
    print("trainer: " + ", ".join(parts), file=sys.stderr, flush=True)
