"""A market to trade on: an island that is online, a seller, and buyers with money. Every test ends with the audit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db.models import Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.invariants import breaches
from marketplace.fleet.models import Island
from marketplace.trading.models import Position
from tests.marketplace.trading.market import funded, make_island


@pytest.fixture(autouse=True)
def books_are_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("django_db")
    if mark is None:
        yield
        return
    request.getfixturevalue("transactional_db" if mark.kwargs.get("transaction") else "db")
    yield
    assert breaches() == []
    assert Position.objects.aggregate(total=Sum("delta_lots"))["total"] in (0, None)


@pytest.fixture
def island(db: None) -> Island:
    return make_island()


@pytest.fixture
def buyer(db: None) -> Organisation:
    return funded("buyer")
