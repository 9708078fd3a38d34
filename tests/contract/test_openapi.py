"""The API against its own description: the schema in docs/ is the one the code gives, and the server keeps to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
import yaml
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiYamlRenderer
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck
from pytest_django import Settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Membership, Role, User
from marketplace.accounts.services import ensure_organisation, issue_key
from marketplace.core.clock import database_now
from marketplace.devstack.state import REPOSITORY
from marketplace.wsgi import application
from tests.fakes.stripe import FakeStripe

CHECKED_IN = REPOSITORY / "docs" / "openapi.yaml"
EXAMPLES = 8  # an operation; enough for the boundaries of each field, and quick


def test_the_schema_in_docs_is_the_one_the_code_gives() -> None:
    schema = SchemaGenerator().get_schema(request=None, public=True)
    validate_schema(schema)
    generated = OpenApiYamlRenderer().render(schema, renderer_context={}).decode()
    assert Path(CHECKED_IN).read_text() == generated, "run `make schema` and look at what changed"


def operations() -> Any:
    return schemathesis.openapi.from_dict(yaml.safe_load(CHECKED_IN.read_text()))


schema = operations()
schema.app = application


@pytest.fixture
def one_transaction(db: None) -> Iterator[None]:
    """Django's server ends a request by closing old connections, and with them the test's transaction: its own test
    client puts that aside, and so do we."""
    ends = (request_started, request_finished)
    for signal in ends:
        signal.disconnect(close_old_connections)
    yield
    for signal in ends:
        signal.connect(close_old_connections)


@pytest.fixture
def api_key(one_transaction: None) -> str:
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    ensure_organisation(user)
    owner = Actor.of_membership(Membership.objects.get(user=user))
    return issue_key(owner, name="schema", role=Role.OWNER, now=database_now()).secret


@pytest.fixture(autouse=True)
def payment_provider(settings: Settings, no_payment_provider: None) -> Iterator[None]:
    """Some operations lead there: while nobody answers, what they say is 503."""
    with FakeStripe() as fake:
        settings.STRIPE_API_BASE, settings.STRIPE_SECRET_KEY = fake.url, fake.key
        yield


@schema.parametrize()
@hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_asked_the_answer_is_as_described_and_never_a_failure(case: Any, api_key: str) -> None:
    headers = {"Authorization": f"Bearer {api_key}", "Idempotency-Key": case.operation.label}
    response = case.call(headers=headers)
    case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])
