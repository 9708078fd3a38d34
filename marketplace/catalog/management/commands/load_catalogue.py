"""`manage.py load_catalogue`: the GPU names and list prices that come with the product. Safe to repeat."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from marketplace.catalog.feeds.list_prices import ListPrices
from marketplace.catalog.services import as_counts, load_gpus, refresh
from marketplace.core.clock import database_now


class Command(BaseCommand):
    help = "Load the GPU names and list prices that come with the product"

    def handle(self, *args: Any, **options: Any) -> None:
        load_gpus()
        counts = as_counts(refresh(ListPrices(), database_now()))
        self.stdout.write(", ".join(f"{name} {value}" for name, value in counts.items()))
