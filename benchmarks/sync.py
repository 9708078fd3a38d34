"""Agents' beats a second that one small machine holds, beside what its database and its web server can do.

    python benchmarks/sync.py                        the published figure: about a minute on two cores
    python benchmarks/sync.py --agents 200 --seconds 3 --json FILE

What is measured: `POST /api/agent/v1/sync` as agents send it (a rising beat, the state of one process, a usage record),
by a closed loop of connections in a process of its own, against the stack as `manage.py dev` runs it: one gunicorn
process of eight threads, the embedded PostgreSQL with its safety on, every beat durable before it is acknowledged.
Every agent is one of `--agents` islands, and each beat counts as a new one. Everything shares the machine.

The bounds, in the same run: one durable UPDATE of an agent's row by PostgreSQL alone on one connection (what a beat
costs with no Python and no checks), and `/healthz` of the same server. The figure is the ratio to each, because the
beats a second alone are this machine's. At the default interval of 5 s, a beat a second holds five agents.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import psycopg

from benchmarks.load import Ask, closed_loop, timed
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import reachable_folder
from worker_agent.protocol import PROTOCOL_VERSION, ProcessReport, SyncRequest, UsageRecord

REPOSITORY = Path(__file__).resolve().parents[1]
INTERVAL_S = 5
# Enrolling each would measure enrolment: the islands and their agents are written as enrolment leaves them.
ENROL = """
from datetime import timedelta
from marketplace.accounts.models import Organisation
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import database_now
from marketplace.core.ids import hash_secret
from marketplace.fleet.models import Agent, Island, Site
now = database_now()
organisation = Organisation.objects.create(name="Sellers")
site = Site.objects.create(organisation=organisation, name="hall", created_at=now)
gpu = GpuModel.objects.get(pk="h100-sxm-80g")
islands = Island.objects.bulk_create(
    Island(site=site, organisation=organisation, name=f"island {n}", gpu=gpu, gpu_count=8,
           price_uusd_per_gpu_hour=1_800_000, available_from=now, state="online", state_since=now, epoch=1,
           created_at=now)
    for n in range(AGENTS)
)
Agent.objects.bulk_create(
    Agent(island=island, epoch=1, credential_hash=hash_secret(f"credential-{n}"), credential_issued_at=now,
          enrolled_at=now, facts={"hostname": "n"}, last_seen_at=now - timedelta(seconds=1))
    for n, island in enumerate(islands)
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()

    with reachable_folder() as folder, Stack(StateDir(folder), web_port=0, celery=False) as stack:
        _manage(stack, "load_catalogue")
        _manage(stack, "shell", "--command", ENROL.replace("AGENTS", str(options.agents)))
        with psycopg.connect(stack.env["DATABASE_URL"], autocommit=True) as connection:
            numbers = itertools.count()

            def bare_beat() -> None:
                connection.execute(
                    "UPDATE fleet_agent SET beat = beat, last_seen_at = clock_timestamp() WHERE credential_hash ="
                    " encode(sha256(%s::bytea), 'hex')",
                    [f"credential-{next(numbers) % options.agents}"],
                )

            bound = timed(bare_beat, 4.0)
        asks = _beats(options.agents, options.connections, rounds=max(2, int(options.seconds * 1000 / options.agents)))
        held = closed_loop(stack.web_url, asks, connections=options.connections, seconds=options.seconds)
        plain = closed_loop(stack.web_url, [Ask("GET", "/healthz")], connections=options.connections, seconds=4.0)
    result = {
        "benchmark": "sync",
        "agents": options.agents,
        "connections": options.connections,
        "cores": os.cpu_count(),
        "beats_per_s": round(held.per_s, 1),
        "sync": asdict(held),
        "agents_held_at_5_s": int(held.per_s * INTERVAL_S),
        "healthz_per_s": round(plain.per_s, 1),
        "postgres_updates_per_s": round(bound, 1),
        "ratio_to_healthz": round(held.per_s / plain.per_s, 3),
        "ratio_to_postgres": round(held.per_s / bound, 3),
    }
    print(
        f"{options.agents:,} agents, {options.connections} connections, {os.cpu_count()} cores: "
        f"{held.per_s:.0f} beats/s (about {result['agents_held_at_5_s']:,} agents at {INTERVAL_S} s), "
        f"p50 {held.p50_ms:.0f} ms, p95 {held.p95_ms:.0f} ms, {held.errors} errors\n"
        f"healthz {plain.per_s:.0f}/s (ratio {result['ratio_to_healthz']}), "
        f"PostgreSQL alone {bound:.0f} updates/s (ratio {result['ratio_to_postgres']})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


def _beats(agents: int, connections: int, *, rounds: int) -> list[Ask]:
    """A stretch for each connection, with agents of its own whose beats rise along it."""
    asks = []
    for first in range(connections):
        for beat in range(1, rounds + 1):
            asks += [_beat(number, beat) for number in range(first, agents, connections)]
    return asks


def _beat(number: int, beat: int) -> Ask:
    request = SyncRequest(
        protocol=PROTOCOL_VERSION,
        epoch=1,
        boot_id="boot",
        beat=beat,
        agent_time_ms=0,
        processes=[ProcessReport(assignment_id="lse_none", generation=1, state="running", pid=1)],
        usage=[UsageRecord(seq=beat, assignment_id="lse_none", gpu_ms_total=beat * 40_000, observed_at_ms=0)],
    )
    headers = (("Authorization", f"Bearer credential-{number}"), ("Content-Type", "application/json"))
    return Ask("POST", "/api/agent/v1/sync", msgspec.json.encode(request), headers)


def _manage(stack: Stack, *command: str) -> None:
    arguments = [sys.executable, "manage.py", *command]
    subprocess.run(arguments, env=stack.env, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
