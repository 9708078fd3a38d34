"""Two hundred buyers of the last GPU, over HTTP, at once: one wins."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import pytest
from pytest_django.live_server_helper import LiveServer

from marketplace.accounts.models import Role
from marketplace.accounts.services import issue_key
from marketplace.billing.invariants import breaches
from marketplace.core.clock import database_now
from marketplace.trading.models import Allocation, Lease
from tests.marketplace.trading.market import USD, cash_uusd, make_island
from tests.marketplace.training.people import customer

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

BUYERS = 200
AT_ONCE = 40  # connections; the database has a hundred, and the others stand behind them
TRIES = 200


def test_of_two_hundred_buyers_of_the_last_gpu_one_wins_and_nobody_else_pays(live_server: LiveServer) -> None:
    island = make_island(gpu_count=1)
    buyers = [customer(dollars=10) for _ in range(BUYERS)]
    keys = [issue_key(buyer, name="race", role=Role.MEMBER, now=database_now()).secret for buyer in buyers]
    end_at = (database_now() + timedelta(hours=1)).isoformat()
    body = {"island_id": island.pk, "gpus": 1, "end_at": end_at}
    gate = threading.Barrier(AT_ONCE)
    places = iter(range(BUYERS))

    def buy(secret: str) -> tuple[int, str]:
        if next(places) < AT_ONCE:
            gate.wait(timeout=60)
        headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "race"}
        for _ in range(TRIES):
            try:
                answer = httpx.post(f"{live_server.url}/api/v1/leases", json=body, headers=headers, timeout=60)
            except httpx.TransportError:
                continue  # a connection that broke says nothing of what was bought: the same call again, by its key
            if answer.status_code != 503:  # others are booking: try again, as a program would
                return answer.status_code, answer.json().get("code", "")
        return 503, ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = Counter(pool.map(buy, keys))

    assert outcomes == {(201, ""): 1, (409, "not_available"): BUYERS - 1}
    won = Lease.objects.get()
    assert Allocation.objects.count() == 1
    for buyer in buyers:
        held = won.price_uusd_per_gpu_hour * (won.end_min - won.start_min) // 60
        assert cash_uusd(buyer.organisation) == 10 * USD - (held if buyer.organisation == won.organisation else 0)
    assert breaches() == []
