"""The Celery application: queues and the beat table.

Invariant: rows hold the work, a message is only a wake-up. Losing every message costs the interval of the matching
sweep below, never work; so messages expire before the next beat and no result is stored.
"""

from __future__ import annotations

import os
from typing import Any, Self

from celery import Celery
from celery.app.amqp import AMQP
from kombu import Connection, Queue

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "marketplace.settings")

# One queue a kind of urgency: a slow feed must never sit in front of a tick.
SCHEDULING = "scheduling"
MONEY = "money"
CHORES = "chores"
QUEUES = (SCHEDULING, MONEY, CHORES)

PULSE_S = 2.0
TICK_S = 2.0
SWEEP_S = 2.0
CLEAR_S = 2.0
TIDY_S = 60.0
PAYMENTS_S = 5.0
PAYING_S = 60.0
# Sooner shows what a job costs sooner, later writes fewer transfers; a tick that takes longer is followed by the next.
METERING_S = 10.0
MATURING_S = 600.0
AUDIT_S = 600.0
FEEDS_S = 300.0  # brokers' offers are fresh for ten minutes


def _beat(task: str, every_s: float, queue: str) -> dict[str, object]:
    return {"task": task, "schedule": every_s, "options": {"queue": queue, "expires": every_s}}


class SteadyConnection(Connection):
    """Asks for a lost broker every second. The library's own growing intervals add half a minute to a long outage."""

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Self:
        pace = {"interval_start": 1, "interval_step": 0, "interval_max": 1}
        return super().ensure_connection(*args, **{**pace, **kwargs})


class SteadyAMQP(AMQP):
    Connection = SteadyConnection


app = Celery("archipelago", amqp=SteadyAMQP)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(
    task_queues=[Queue(name) for name in QUEUES],
    task_default_queue=CHORES,
    task_routes={
        "scheduler.tasks.tidy": {"queue": CHORES},
        "scheduler.tasks.*": {"queue": SCHEDULING},
        "marketplace.billing.tasks.*": {"queue": MONEY},
    },
    beat_schedule={
        "pulse": _beat("marketplace.pulse", PULSE_S, SCHEDULING),
        "tick": _beat("scheduler.tasks.tick", TICK_S, SCHEDULING),
        "sweep": _beat("scheduler.tasks.sweep", SWEEP_S, SCHEDULING),
        "clear": _beat("scheduler.tasks.clear", CLEAR_S, SCHEDULING),
        "tidy": _beat("scheduler.tasks.tidy", TIDY_S, CHORES),
        "drain-inbox": _beat("marketplace.billing.tasks.drain_inbox", PAYMENTS_S, MONEY),
        "meter": _beat("marketplace.billing.tasks.meter", METERING_S, MONEY),
        "pay": _beat("marketplace.billing.tasks.pay", PAYING_S, MONEY),
        "mature": _beat("marketplace.billing.tasks.mature", MATURING_S, MONEY),
        # Reads the whole ledger, so it waits in no queue in which money waits.
        "audit": _beat("marketplace.billing.tasks.audit", AUDIT_S, CHORES),
        "refresh-feeds": _beat("marketplace.catalog.tasks.refresh_feeds", FEEDS_S, CHORES),
    },
)
# `scheduler` is no Django app: it owns no table. It is named here, as a string, so that nothing of ours imports it.
app.autodiscover_tasks()
app.autodiscover_tasks(["scheduler"])


@app.task(name="marketplace.pulse")
def pulse() -> None:
    """Does nothing but arrive: a silent beat or worker is thereby told from an idle one (marketplace.liveness)."""


def _watch_over() -> None:
    # Imported here: the watch needs the settings that Celery has just been pointed at.
    from marketplace.liveness import watch_over

    watch_over(app)


app.on_after_configure.connect(lambda **_: _watch_over(), weak=False)
