"""Every test that touched the database ends with the books audited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marketplace.billing.invariants import breaches


@pytest.fixture(autouse=True)
def books_are_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("django_db")
    if mark is None:
        yield
        return
    request.getfixturevalue("transactional_db" if mark.kwargs.get("transaction") else "db")
    yield
    assert breaches() == []
