"""Live leases that a metering tick charges, and captures a second, one by one and set by set.

    python benchmarks/metering.py                         the published figure: about three minutes on two cores
    python benchmarks/metering.py --leases 3000 --json FILE

What is measured: `billing.services.ticking.capture_due` over `--leases` open meters, all of which delivered a minute
since the last tick: two ticks, the second is the figure. Beside it `report_usage`, which counts and charges one meter
in a transaction of its own, from one thread and from eight. The embedded PostgreSQL has its safety on and every
transaction is durable. At the end every invariant of the ledger is checked over what was posted.

The bound, in the same run: the same transfers and balances written by PostgreSQL alone, to copies of the tables with
their indexes, in statements of as many rows as a batch has, with no check and no trigger. The figure is the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import reachable_folder

BATCH = 1_000
PEOPLE = 500  # buyers, and as many sellers
GPUS = 8
RATE_UUSD_PER_GPU_HOUR = 1_800_000
TICK_S = 60
SINGLES = 800
BOUND = """
CREATE TABLE bound_account (LIKE billing_ledgeraccount INCLUDING DEFAULTS INCLUDING INDEXES);
INSERT INTO bound_account SELECT * FROM billing_ledgeraccount;
CREATE TABLE bound_transfer (LIKE billing_transfer INCLUDING DEFAULTS INCLUDING INDEXES);
ANALYZE bound_account;
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=60_000)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    with reachable_folder() as folder, Stack(StateDir(folder), web_port=0, celery=False) as stack:
        os.environ.update(stack.env)
        import django

        django.setup()
        result = measure(options.leases)
    print(
        f"{result['leases']:,} live leases, {result['cores']} cores: a tick in {result['tick_s']:.1f} s, "
        f"{result['captures_per_s_batched']:,.0f} leases/s ({result['transfers_per_s']:,.0f} transfers/s)\n"
        f"one by one {result['captures_per_s_single']:,.0f} leases/s, from eight threads "
        f"{result['captures_per_s_eight']:,.0f}; PostgreSQL alone {result['postgres_leases_per_s']:,.0f} "
        f"(ratio {result['ratio_to_postgres']})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


def measure(leases: int) -> dict[str, Any]:
    from django.db import connection

    from marketplace.billing.invariants import breaches
    from marketplace.billing.services.ticking import capture_due
    from marketplace.core.clock import database_now

    refs = fill(leases)
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
        cursor.execute("VACUUM ANALYZE")
        ticks = []
        for tick in (1, 2):
            deliver(tick)
            began = time.perf_counter()
            charged = capture_due(database_now())
            ticks.append(time.perf_counter() - began)
            if charged != leases:
                raise SystemExit(f"tick {tick} charged {charged} of {leases}")
        alone_s = bound(cursor, refs)
    single = one_by_one(refs[:SINGLES], threads=1)
    eight = one_by_one(refs[SINGLES : 2 * SINGLES], threads=8)
    broken = breaches()
    if broken:
        raise SystemExit(f"the ledger is broken: {broken[:3]}")
    return {
        "benchmark": "metering",
        "leases": leases,
        "cores": os.cpu_count(),
        "tick_s": round(ticks[1], 2),
        "first_tick_s": round(ticks[0], 2),
        "captures_per_s_batched": round(leases / ticks[1], 1),
        "transfers_per_s": round(2 * leases / ticks[1], 1),
        "captures_per_s_single": round(single, 1),
        "captures_per_s_eight": round(eight, 1),
        "postgres_leases_per_s": round(leases / alone_s, 1),
        "ratio_to_postgres": round(alone_s / ticks[1], 3),
    }


def fill(leases: int) -> list[str]:
    """Open meters as renting leaves them: an escrow each, that holds a day, funded through the ledger."""
    from marketplace.accounts.models import Organisation
    from marketplace.billing.ledger import Entry, account, post_set
    from marketplace.billing.models import AccountKind, LedgerAccount, Meter, Normal, TransferKind
    from marketplace.billing.services.holds import deposit
    from marketplace.core.clock import database_now
    from marketplace.core.ids import fact_id

    now = database_now()
    day_uusd = RATE_UUSD_PER_GPU_HOUR * GPUS * 24
    buyers = [Organisation.objects.create(name=f"buyer {n}") for n in range(PEOPLE)]
    sellers = [Organisation.objects.create(name=f"seller {n}") for n in range(PEOPLE)]
    cash = []
    for buyer in buyers:
        deposit(buyer, day_uusd * (leases // PEOPLE + 1), f"pi_{buyer.pk}")
        cash.append(account(AccountKind.BUYER_CASH, buyer))
    refs = [f"lse_{n:026d}" for n in range(leases)]
    for first in range(0, leases, BATCH):
        part = list(enumerate(refs[first : first + BATCH], first))
        escrows = LedgerAccount.objects.bulk_create(
            LedgerAccount(
                kind=AccountKind.ESCROW, organisation=buyers[n % PEOPLE], ref=ref, normal=Normal.CREDIT, floor_uusd=0
            )
            for n, ref in part
        )
        post_set(
            [
                Entry(fact_id("hold", ref), TransferKind.HOLD, cash[n % PEOPLE], escrow, day_uusd, ref)
                for (n, ref), escrow in zip(part, escrows, strict=True)
            ]
        )
        Meter.objects.bulk_create(
            Meter(
                id=ref,
                buyer=buyers[n % PEOPLE],
                seller=sellers[n * 7 % PEOPLE],
                escrow=escrow,
                refund=cash[n % PEOPLE],
                rate_uusd_per_gpu_hour=RATE_UUSD_PER_GPU_HOUR,
                fee_bps=500,
                gpus=GPUS,
                start_at=now,
                end_at=now + timedelta(days=1),
            )
            for (n, ref), escrow in zip(part, escrows, strict=True)
        )
    return refs


def deliver(ticks: int) -> None:
    """So many minutes, seen and counted on every lease, as the agents' syncs leave them."""
    from django.db import connection

    gpu_ms = ticks * TICK_S * 1_000 * GPUS
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO billing_metercounter (meter_id, source, epoch, gpu_ms_total)"
            " SELECT id, '', 1, %s FROM billing_meter"
            " ON CONFLICT (meter_id, source, epoch) DO UPDATE SET gpu_ms_total = excluded.gpu_ms_total",
            [gpu_ms],
        )
        cursor.execute("UPDATE billing_meter SET covered_gpu_ms = %s", [gpu_ms])


def bound(cursor: Any, refs: list[str]) -> float:
    """What PostgreSQL alone needs to write as much, in seconds."""
    cursor.execute(BOUND)
    began = time.perf_counter()
    for first in range(0, len(refs), BATCH):
        part = refs[first : first + BATCH]
        cursor.execute(
            "INSERT INTO bound_transfer SELECT gen_random_uuid(), t.kind, t.phase, t.amount_uusd, t.journal_id, t.ref,"
            " t.effective_at, t.created_at, t.credit_id, t.debit_id, NULL FROM billing_transfer t"
            " WHERE t.ref = ANY(%s) AND t.kind IN (30, 31) ORDER BY t.created_at DESC LIMIT %s",
            [part, 2 * len(part)],
        )
        cursor.execute(
            "UPDATE bound_account a SET debits_posted_uusd = debits_posted_uusd + 1,"
            " credits_posted_uusd = credits_posted_uusd + 1"
            " WHERE id IN (SELECT escrow_id FROM billing_meter WHERE id = ANY(%s))",
            [part],
        )
    return time.perf_counter() - began


def one_by_one(refs: list[str], *, threads: int) -> float:
    """Captures a second, each of the next half a minute of one meter."""
    from django.db import connection

    from marketplace.billing.models import Meter
    from marketplace.billing.services.metering import report_usage

    gpu_ms = 2 * TICK_S * 1_000 * GPUS + TICK_S * 500 * GPUS
    Meter.objects.filter(pk__in=refs).update(covered_gpu_ms=gpu_ms)

    def work(mine: list[str]) -> None:
        try:
            for ref in mine:
                report_usage(ref, 1, gpu_ms)
        finally:
            if threads > 1:
                connection.close()

    shares = [refs[number::threads] for number in range(threads)]
    began = time.perf_counter()
    if threads == 1:
        work(refs)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, shares))
    return len(refs) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
