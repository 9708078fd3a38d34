"""Data parallel inside an island: the same batch spread over two processes is the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_agent.protocol import RoundOrder, RunSpec
from worker_agent.trainer.assemble import assemble
from worker_agent.trainer.distributed import Group
from worker_agent.trainer.exchange_local import LocalCoordinator
from worker_agent.trainer.inner import ComputeOptions

ROOT = Path(__file__).parents[3]

RANK_PROGRAM = """
import hashlib, json, sys
from pathlib import Path
import msgspec
from worker_agent.protocol import RoundOrder, RunSpec
from worker_agent.trainer.assemble import assemble, assemble_follower
from worker_agent.trainer.distributed import Group, join_group
from worker_agent.trainer.exchange_local import LocalCoordinator
from worker_agent.trainer.inner import ComputeOptions
from worker_agent.trainer.state import little_endian_bytes

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
group = Group(rank=rank, size=2, local_rank=rank)
join_group(group, folder / "rendezvous", cuda=False)
options = ComputeOptions(device="cpu", micro_windows=3)
out = {}
if rank == 0:
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunSpec)
    island = assemble(run, LocalCoordinator(run, folder / "store").admit("m"), folder, group, options)
    island.load(island.initial)
    order = RoundOrder(round=0, steps=6, tokens_before=0, data_slot=0, data_slots=1, deadline_ms=0, data_start=0)
    work = island.train(order, lambda progress: progress.steps < 5)
    out = {"steps": work.steps, "loss": work.loss_nats, "bits": island.evaluate()}
    island.stop()
else:
    island = assemble_follower(folder, group, options)
    island.follow()
out["digest"] = hashlib.sha256(little_endian_bytes(island.parameters())).hexdigest()
print(json.dumps(out))
group.close()
"""


def test_two_processes_take_the_steps_one_would_and_stay_equal(small_run: RunSpec, tmp_path: Path) -> None:
    import msgspec

    (tmp_path / "run.json").write_bytes(msgspec.json.encode(small_run))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [json.loads(process.communicate(timeout=90)[0]) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert outputs[0]["digest"] == outputs[1]["digest"]

    exchange = LocalCoordinator(small_run, tmp_path / "store").admit("m")
    alone = assemble(small_run, exchange, tmp_path, Group(), ComputeOptions(device="cpu"))
    order = RoundOrder(round=0, steps=6, tokens_before=0, data_slot=0, data_slots=1, deadline_ms=0, data_start=0)
    work = alone.train(order, lambda progress: progress.steps < 5)
    assert outputs[0]["steps"] == work.steps == 5
    assert outputs[0]["loss"] == pytest.approx(work.loss_nats, abs=1e-3)
    assert outputs[0]["bits"] == pytest.approx(alone.evaluate(), abs=1e-2)


def test_a_single_process_needs_no_group() -> None:
    group = Group()
    assert group.is_lead
    assert group.agree(True)
    assert group.announce(b"x") == b"x"
    group.close()
