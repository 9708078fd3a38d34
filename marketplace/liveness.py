"""Whether a process still does its work: the health page of the web, and a watch inside each Celery process.

A Celery worker can come back from a lost broker connected, and yet never take a message again (celery#10205); beat can
hang the same way. From outside such a process looks well. So each watches itself: work is waiting and none has been
taken for a while means stuck, and a stuck process ends itself for its supervisor to start it anew. That is safe at any
moment, because rows hold the work and every task may run twice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish, beat_init, task_postrun, task_prerun, worker_ready
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
STUCK_AFTER_S = 20.0
# Tasks are short; one that runs this long hangs in something that no timeout covers.
BUSY_LIMIT_S = 300.0
STUCK_EXIT_CODE = 75  # EX_TEMPFAIL: try again


def health(request: HttpRequest) -> HttpResponse:
    """200 when a request can be served, which takes the database; 503 with the reason otherwise."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        return JsonResponse({"database": str(error).strip()}, status=503)
    return JsonResponse({"database": "ok"})


@dataclass
class Progress:
    """When work was last taken, and how much is in hand. `at_s` is monotonic."""

    at_s: float
    in_hand: int = 0


def is_stuck(progress: Progress, *, now_s: float, waiting: int) -> bool:
    """Work waits, none has been taken for long, and what is in hand (if anything) has been for far too long."""
    limit_s = BUSY_LIMIT_S if progress.in_hand else STUCK_AFTER_S
    return waiting > 0 and now_s - progress.at_s > limit_s


class Watch(threading.Thread):
    """Looks every few seconds; writes LIVENESS_FILE while all is well, for a health check from outside."""

    def __init__(self, name: str, progress: Progress, waiting: Callable[[], int | None]) -> None:
        super().__init__(name=f"watch-{name}", daemon=True)
        self._process, self._progress, self._waiting = name, progress, waiting
        file = os.environ.get("LIVENESS_FILE")
        self._file = Path(file) if file else None

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        waiting = self._waiting()
        if waiting is None:
            # The broker is away: not our fault, and nothing has been taken since then by anyone.
            self._progress.at_s = time.monotonic()
        elif is_stuck(self._progress, now_s=time.monotonic(), waiting=waiting):
            logger.critical("%s is stuck with %d messages waiting: ending for a fresh start", self._process, waiting)
            # Not an orderly shutdown: what is stuck may be what an orderly shutdown would wait for.
            os._exit(STUCK_EXIT_CODE)
        if self._file is not None:
            self._file.write_text(f"{os.getpid()} {int(time.time())}\n")


def _messages_waiting(app: Celery, queues: list[str]) -> int | None:
    """Messages nobody has taken, over a connection of its own; None when the broker does not answer."""
    try:
        with app.connection_for_read() as link:
            channel: Any = link.default_channel
            channel.client.ping()
            return sum(int(channel.client.llen(queue)) for queue in queues)
    except Exception as error:  # whatever transport is configured raises errors of its own; all mean: no answer
        logger.debug("no answer from the broker: %s", error)
        return None


def watch_over(app: Celery) -> None:
    """Have every worker and beat of this application watch itself."""

    def watch_worker(**_: object) -> None:
        progress = Progress(time.monotonic())
        lock = threading.Lock()

        def taken(**_: object) -> None:
            with lock:
                progress.at_s, progress.in_hand = time.monotonic(), progress.in_hand + 1

        def done(**_: object) -> None:
            with lock:
                progress.at_s, progress.in_hand = time.monotonic(), progress.in_hand - 1

        task_prerun.connect(taken, weak=False)
        task_postrun.connect(done, weak=False)
        queues = [str(queue.name) for queue in app.amqp.queues.consume_from.values()]
        Watch("worker", progress, lambda: _messages_waiting(app, queues)).start()

    def watch_beat(**_: object) -> None:
        progress = Progress(time.monotonic())

        def sent(**_: object) -> None:
            progress.at_s = time.monotonic()

        def due() -> int | None:
            # Beat always has something due within seconds, so as long as the broker answers, one is waiting to be sent.
            return None if _messages_waiting(app, []) is None else 1

        after_task_publish.connect(sent, weak=False)
        Watch("beat", progress, due).start()

    worker_ready.connect(watch_worker, weak=False)
    beat_init.connect(watch_beat, weak=False)
