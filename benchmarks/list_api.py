"""Requests a second of the catalogue's list at 100,000 offers, beside what its database and its web server can do.

    python benchmarks/list_api.py                       the published figure: about two minutes on two cores
    python benchmarks/list_api.py --offers 5000 --seconds 3 --json FILE

What is measured: `GET /api/v1/offers` in a mix of what people ask (first pages by price, one GPU, a price limit, spot
only, a deep page), by a closed loop of connections in a process of its own, against the stack as `manage.py dev` runs
it: one gunicorn process of eight threads, the embedded PostgreSQL with its safety on. Everything shares the machine.

The bounds, in the same run: the same pages asked of PostgreSQL alone, answered as JSON by the database (what the list
would cost with no Python in between), and `/healthz` of the same server (what a request costs that reads nothing).
The figure is the ratio to each, because the requests a second alone are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg

from benchmarks.load import Ask, closed_loop, timed
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import reachable_folder

MIX = (
    "",
    "?gpu=H100",
    "?gpu=H100&sort=-seen",
    "?max_price_uusd_per_gpu_hour=2000000",
    "?spot=true&limit=20",
    "?min_vram_gib=80&limit=100",
    "?offset=5000",
)
# Copies of the real offers under other identities: the same GPUs, channels and spread of prices, at the size asked for.
MULTIPLY = """
INSERT INTO catalog_offer SELECT (jsonb_populate_record(o, jsonb_build_object(
    'offer_uid', encode(sha256((o.offer_uid || ':' || n)::bytea), 'hex'),
    'upstream_sku', o.upstream_sku || ':' || n,
    'price_uusd_per_gpu_hour', (o.price_uusd_per_gpu_hour * (0.7 + 0.6 * ((n * 7919) %% 1000) / 1000.0))::bigint,
    'observed_at', o.observed_at + n * interval '1 minute'))).*
FROM catalog_offer o, generate_series(1, %s) n
LIMIT %s
"""
# The same first page as the API gives it, made to JSON by the database itself.
BOUND = """
SELECT json_agg(page) FROM (
    SELECT o.*, g.name AS gpu_name, c.name AS channel_name FROM catalog_offer o
    LEFT JOIN catalog_gpumodel g ON g.id = o.gpu_id JOIN catalog_channel c ON c.slug = o.channel_id
    WHERE o.quarantine_reason = '' AND o.withdrawn_at IS NULL
    ORDER BY o.price_uusd_per_gpu_hour ASC NULLS LAST, o.offer_uid LIMIT 50) page
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offers", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()

    with reachable_folder() as folder, Stack(StateDir(folder), web_port=0, celery=False) as stack:
        _fill(stack, options.offers)
        with psycopg.connect(stack.env["DATABASE_URL"], autocommit=True) as connection:
            offers = connection.execute("SELECT count(*) FROM catalog_offer").fetchone()
            bound = timed(lambda: connection.execute(BOUND).fetchone(), min(options.seconds, 5.0))
        asks = [Ask("GET", f"/api/v1/offers{query}") for query in MIX]
        closed_loop(stack.web_url, asks, connections=options.connections, seconds=2.0)  # caches and plans
        listed = closed_loop(stack.web_url, asks, connections=options.connections, seconds=options.seconds)
        plain = closed_loop(stack.web_url, [Ask("GET", "/healthz")], connections=options.connections, seconds=5.0)
    result = {
        "benchmark": "list_api",
        "offers": offers[0] if offers else None,
        "connections": options.connections,
        "cores": os.cpu_count(),
        "requests_per_s": round(listed.per_s, 1),
        "list": asdict(listed),
        "healthz_per_s": round(plain.per_s, 1),
        "postgres_json_pages_per_s": round(bound, 1),
        "ratio_to_healthz": round(listed.per_s / plain.per_s, 3),
        "ratio_to_postgres": round(listed.per_s / bound, 3),
    }
    print(
        f"{result['offers']:,} offers, {options.connections} connections, {os.cpu_count()} cores: "
        f"{listed.per_s:.0f} requests/s, p50 {listed.p50_ms:.0f} ms, "
        f"p95 {listed.p95_ms:.0f} ms, {listed.errors} errors\n"
        f"healthz {plain.per_s:.0f}/s (ratio {result['ratio_to_healthz']}), "
        f"PostgreSQL alone {bound:.0f} pages/s (ratio {result['ratio_to_postgres']})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


def _fill(stack: Stack, offers: int) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "load_catalogue"],
        env=stack.env,
        check=True,
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.DEVNULL,
    )
    with psycopg.connect(stack.env["DATABASE_URL"], autocommit=True) as connection:
        (have,) = connection.execute("SELECT count(*) FROM catalog_offer").fetchone() or (0,)
        connection.execute(MULTIPLY, [offers // have + 1, max(0, offers - have)])
        connection.execute("VACUUM ANALYZE catalog_offer")


if __name__ == "__main__":
    main()
