"""`manage.py check_ledger`: run the audit; exit code 1 names what is broken."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from marketplace.billing.invariants import CHECKS, breaches


class Command(BaseCommand):
    help = "Check every invariant of the ledger."

    def handle(self, *args: Any, **options: Any) -> None:
        found = breaches()
        if found:
            raise CommandError("\n".join(f"{breach.invariant}: {breach.subject}" for breach in found))
        self.stdout.write(f"{len(CHECKS)} invariants hold")
