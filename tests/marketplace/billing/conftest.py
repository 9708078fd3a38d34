"""Every billing test that touches the database ends with the audit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from marketplace.billing.invariants import breaches


@pytest.fixture(autouse=True)
def ledger_is_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("django_db")
    if mark is None:
        yield
        return
    several_transactions = bool(mark.kwargs.get("transaction"))
    request.getfixturevalue("transactional_db" if several_transactions else "db")
    yield
    assert breaches() == []
    if several_transactions:
        # Django empties the tables after such a test; the guard against just that is put aside for it.
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE billing_transfer DISABLE TRIGGER transfer_no_truncate")
