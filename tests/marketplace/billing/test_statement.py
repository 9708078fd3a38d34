from __future__ import annotations

from datetime import timedelta

import pytest

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.selectors import statement
from marketplace.billing.services.holds import cash, deposit, hold, release
from marketplace.core.clock import database_now

USD = 1_000_000


@pytest.mark.django_db
def test_a_statement_adds_up_whatever_its_period() -> None:
    buyer = Organisation.objects.create(name="a")
    before = database_now()
    deposit(buyer, 10 * USD, "pi_1")
    between = database_now()
    held = hold("job:1", buyer, 3 * USD)
    release(held, cash(buyer))
    hold("job:2", buyer, 2 * USD)
    after = database_now() + timedelta(seconds=1)
    for since, until in ((before, after), (before, between), (between, after)):
        for part in statement(buyer, since, until):
            assert part.opening_uusd + sum(line.amount_uusd for line in part.lines) == part.closing_uusd
    last = {part.account.pk: part.closing_uusd for part in statement(buyer, between, after)}
    assert last[cash(buyer).pk] == balance_uusd(cash(buyer)) == 8 * USD


@pytest.mark.django_db
def test_a_statement_shows_nothing_of_others() -> None:
    buyer, other = (Organisation.objects.create(name=name) for name in "ab")
    deposit(buyer, USD, "pi_1")
    assert statement(other, database_now() - timedelta(days=1), database_now()) == []
