"""One payment told of by many at the same time, and its whole way through the stack while parts of that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from django.db import connection

from marketplace.accounts.access import Actor
from marketplace.billing.models import StripeEvent, TopUp, TopUpState, Transfer
from marketplace.billing.selectors import balances
from marketplace.billing.services import inbox
from marketplace.billing.services.topups import open_payment, settle_top_up, start_top_up
from marketplace.core.clock import database_now
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.fakes.stripe import FakeStripe
from tests.servers import wait_until

USD = 1_000_000


def in_its_own_connection(work: Callable[[], object]) -> object:
    try:
        return work()
    finally:
        connection.close()


@pytest.mark.django_db(transaction=True)
def test_eight_at_once_make_one_deposit(buyer: Actor, stripe: FakeStripe, pay: Callable[..., str]) -> None:
    now = database_now()
    top_up = open_payment(start_top_up(buyer, amount_uusd=25 * USD, now=now).pk, now)
    pay(top_up.pay_url)
    with ThreadPoolExecutor(8) as threads:
        settled = [
            threads.submit(in_its_own_connection, lambda: settle_top_up(top_up.pk, database_now()).state)
            for _ in range(8)
        ]
        assert {each.result() for each in settled} == {TopUpState.PAID}
    assert (Transfer.objects.count(), balances(buyer.organisation).cash_uusd) == (1, 25 * USD)


@pytest.mark.django_db(transaction=True)
def test_two_workers_act_on_a_message_once_between_them(
    buyer: Actor, stripe: FakeStripe, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    now = database_now()
    top_up = open_payment(start_top_up(buyer, amount_uusd=25 * USD, now=now).pk, now)
    pay(top_up.pay_url)
    deliver()
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(in_its_own_connection, lambda: inbox.drain(database_now())) for _ in range(4)]
        assert sum(int(str(each.result())) for each in done) == 2
    assert set(StripeEvent.objects.values_list("attempts", flat=True)) == {1}
    assert TopUp.objects.get().state == TopUpState.PAID


@pytest.fixture
def stack(stack_state: StateDir) -> Iterator[Stack]:
    with Stack(stack_state, web_port=0, fragile=True) as running:
        yield running


@pytest.mark.prove
def test_a_payment_arrives_though_broker_web_or_worker_is_killed_while_it_is_made(stack: Stack) -> None:
    added = subprocess.run(
        [sys.executable, "manage.py", "add_account", f"{uuid.uuid4().hex}@example.org", "North"],
        input="correct horse battery\n",
        capture_output=True,
        text=True,
        check=True,
        env=stack.env,
    )
    headers = {"Authorization": f"Bearer {json.loads(added.stdout)['api_key']}"}
    with httpx.Client(base_url=stack.web_url, headers=headers, timeout=20) as api:

        def begin() -> dict[str, str]:
            answer = api.post(
                "/api/v1/top-ups", json={"amount_uusd": 25 * USD}, headers={"Idempotency-Key": str(uuid.uuid4())}
            )
            assert answer.status_code == 201
            body: dict[str, str] = answer.json()
            return body

        for paid, victim in enumerate(("", "valkey", "web", "worker"), start=1):
            top_up = begin()
            if victim:
                stack.kill(victim, revive=False)
            httpx.post(top_up["pay_url"], data={"button": "pay"})
            if victim:
                stack.start(victim)
            wait_until(
                lambda name=top_up["id"]: api.get(f"/api/v1/top-ups/{name}").json()["state"] == "paid",  # type: ignore[misc]
                limit_s=60,
                what=f"it is paid although {victim or 'nothing'} was killed",
            )
            assert api.get("/api/v1/balance").json()["cash_uusd"] == paid * 25 * USD
