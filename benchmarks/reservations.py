"""Reservations a second over HTTP, with nothing sold twice, beside what the server and its database can do.

    python benchmarks/reservations.py                     the published figure: under a minute on two cores
    python benchmarks/reservations.py --seconds 3 --json FILE

What is measured: `POST /api/v1/leases`, each with a key of its own, for an hour of one or two GPUs somewhere in the
next weeks on one of `--islands` islands, by a closed loop of connections against the stack as `manage.py dev` runs it.
Each holds the money, locks the island, finds the slots, writes lease, contract, positions, slots, meter and the trail,
and is durable before it is answered. What is taken already is refused with 409: an answer too, and counted apart. At
the end the database is asked whether any slot is held twice, and every invariant of the ledger is checked.

The bounds, in the same run: `/healthz` of the same server, and PostgreSQL alone inserting rows under the same exclusion
constraint, one a transaction. The figure is the ratio to each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg

from benchmarks.load import Ask, closed_loop, timed
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import reachable_folder

REPOSITORY = Path(__file__).resolve().parents[1]
BUYERS = 40
HOURS = 24 * 14
FILL = """
import json
from marketplace.accounts.access import Actor
from marketplace.accounts.models import Membership, Organisation, Role, User
from marketplace.accounts.services import create_organisation, issue_key
from marketplace.billing.services.holds import deposit
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import database_now
from marketplace.fleet.models import Island, Site
now = database_now()
seller = Organisation.objects.create(name="Sellers")
site = Site.objects.create(organisation=seller, name="hall", created_at=now)
gpu = GpuModel.objects.get(pk="h100-sxm-80g")
islands = Island.objects.bulk_create(
    Island(site=site, organisation=seller, name=f"island {n}", gpu=gpu, gpu_count=8, price_uusd_per_gpu_hour=1_800_000,
           available_from=now, state="online", state_since=now, epoch=1, created_at=now)
    for n in range(ISLANDS)
)
keys = []
for n in range(BUYERS):
    user = User.objects.create_user(f"buyer{n}@example.org")
    organisation = create_organisation(user, name=f"buyer {n}")
    deposit(organisation, 50_000_000_000, f"pi_{n}")
    actor = Actor.of_membership(Membership.objects.get(user=user, organisation=organisation))
    keys.append(issue_key(actor, name="bench", role=Role.OWNER, now=now).secret)
print(json.dumps({"islands": [island.pk for island in islands], "keys": keys}))
"""
TWICE = """
SELECT count(*) FROM trading_allocation a JOIN trading_allocation b
    ON a.island_id = b.island_id AND a.slot = b.slot AND a.id < b.id
   AND int4range(a.start_min, a.end_min) && int4range(b.start_min, b.end_min)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    with reachable_folder() as folder, Stack(StateDir(folder), web_port=0, celery=False) as stack:
        _manage(stack, "load_catalogue")
        there = json.loads(_manage(stack, "shell", "--verbosity", "0", "--command", _filled(options.islands)))
        asks = _asks(there, int(options.seconds * 200))
        booked = closed_loop(stack.web_url, asks, connections=options.connections, seconds=options.seconds, good=(201,))
        plain = closed_loop(stack.web_url, [Ask("GET", "/healthz")], connections=options.connections, seconds=4.0)
        with psycopg.connect(stack.env["DATABASE_URL"], autocommit=True) as connection:
            (leases,) = connection.execute("SELECT count(*) FROM trading_lease").fetchone() or (0,)
            (twice,) = connection.execute(TWICE).fetchone() or (None,)
            bound = _bound(connection)
        _manage(stack, "check_ledger")
    if twice or leases != booked.requests:
        raise SystemExit(f"{twice} slots are held twice; {booked.requests} answers and {leases} leases")
    result = {
        "benchmark": "reservations",
        "islands": options.islands,
        "connections": options.connections,
        "cores": os.cpu_count(),
        "reservations_per_s": round(booked.per_s, 1),
        "booked": asdict(booked),
        "held_twice": twice,
        "healthz_per_s": round(plain.per_s, 1),
        "postgres_inserts_per_s": round(bound, 1),
        "ratio_to_healthz": round(booked.per_s / plain.per_s, 3),
        "ratio_to_postgres": round(booked.per_s / bound, 3),
    }
    print(
        f"{options.islands} islands, {options.connections} connections, {os.cpu_count()} cores: "
        f"{booked.per_s:.0f} reservations/s, p50 {booked.p50_ms:.0f} ms, p95 {booked.p95_ms:.0f} ms, "
        f"{booked.errors} refused, {twice} held twice\n"
        f"healthz {plain.per_s:.0f}/s (ratio {result['ratio_to_healthz']}), "
        f"PostgreSQL alone {bound:.0f} inserts/s (ratio {result['ratio_to_postgres']})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


def _asks(there: dict[str, Any], count: int) -> list[Ask]:
    rng = random.Random(1)
    first = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    asks = []
    for number in range(count):
        start = first + timedelta(hours=rng.randrange(HOURS))
        body = {
            "island_id": rng.choice(there["islands"]),
            "gpus": rng.choice((1, 1, 2)),
            "start_at": start.isoformat(),
            "end_at": (start + timedelta(hours=1)).isoformat(),
        }
        headers = (
            ("Authorization", f"Bearer {rng.choice(there['keys'])}"),
            ("Idempotency-Key", f"bench-{number}"),
            ("Content-Type", "application/json"),
        )
        asks.append(Ask("POST", "/api/v1/leases", json.dumps(body).encode(), headers))
    return asks


def _bound(connection: psycopg.Connection[Any]) -> float:
    connection.execute(
        "CREATE TABLE bound_slot (island text, slot int, held int4range,"
        " EXCLUDE USING gist (island WITH =, slot WITH =, held WITH &&))"
    )
    numbers = itertools.count()

    def insert() -> None:
        number = next(numbers)
        connection.execute(
            "INSERT INTO bound_slot VALUES (%s, %s, int4range(%s, %s))",
            [f"island {number % 50}", number // 50 % 8, number * 60, number * 60 + 60],
        )

    return timed(insert, 4.0)


def _filled(islands: int) -> str:
    return FILL.replace("ISLANDS", str(islands)).replace("BUYERS", str(BUYERS))


def _manage(stack: Stack, *command: str) -> str:
    arguments = [sys.executable, "manage.py", *command]
    run = subprocess.run(arguments, env=stack.env, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout


if __name__ == "__main__":
    main()
