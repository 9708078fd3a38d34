"""`manage.py make_operator`: somebody who has an account runs the market from now on, or no longer does."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from marketplace.accounts.models import User


class Command(BaseCommand):
    help = "Let an account see the operators' desk and decide what is decided there."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email")
        parser.add_argument("--no-longer", action="store_true", help="take it away")

    def handle(self, *args: Any, **options: Any) -> None:
        is_operator = not options["no_longer"]
        if not User.objects.filter(email__iexact=options["email"]).update(is_staff=is_operator):
            raise CommandError(f"there is no account of {options['email']}")
        self.stdout.write(f"{options['email']} {'is an operator' if is_operator else 'is no operator any more'}")
