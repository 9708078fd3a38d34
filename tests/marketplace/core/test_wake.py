"""Wake-ups against a real broker, and without one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import redis
from celery import current_app
from django.db import transaction
from pytest_django import Settings

from marketplace.celery import SCHEDULING
from marketplace.core.wake import wake
from marketplace.devstack.ports import free_port

TASK = "scheduler.tasks.tick"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, settings: Settings, valkey_url: str) -> Iterator[redis.Redis]:
    settings.WAKE_UPS = True
    send_through(valkey_url, monkeypatch)
    with redis.Redis.from_url(valkey_url) as client:
        yield client


def send_through(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the application at another broker: its pools were made for the configured one."""
    monkeypatch.setattr(current_app.conf, "broker_url", url)
    monkeypatch.setattr(current_app.conf, "broker_write_url", url)
    monkeypatch.setattr(current_app, "_pool", None)
    monkeypatch.setattr(current_app.amqp, "_producer_pool", None)


@pytest.mark.django_db(transaction=True)
def test_a_wake_up_is_sent_once_what_woke_it_is_durable(broker: redis.Redis) -> None:
    with transaction.atomic():
        wake(TASK)
        assert broker.llen(SCHEDULING) == 0
    message = json.loads(broker.lindex(SCHEDULING, 0))
    assert message["headers"]["task"] == TASK
    assert message["headers"]["expires"] is not None


@pytest.mark.django_db(transaction=True)
def test_what_was_rolled_back_wakes_nobody(broker: redis.Redis) -> None:
    with transaction.atomic():
        wake(TASK)
        transaction.set_rollback(True)
    assert broker.llen(SCHEDULING) == 0


@pytest.mark.django_db(transaction=True)
def test_a_broker_that_is_away_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.WAKE_UPS = True
    send_through(f"redis://127.0.0.1:{free_port()}/0", monkeypatch)
    with caplog.at_level(logging.WARNING, "marketplace.core.wake"):
        wake(TASK)
    assert "was not woken" in caplog.text
