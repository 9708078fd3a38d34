"""Wake-ups of the catalogue. Each is safe to lose and to repeat."""

from __future__ import annotations

from celery import shared_task

from marketplace.catalog.feeds.configured import configured_feeds
from marketplace.catalog.services import refresh
from marketplace.core.clock import database_now


@shared_task(name="marketplace.catalog.tasks.refresh_feeds")
def refresh_feeds() -> None:
    for feed in configured_feeds():
        refresh(feed, database_now())
