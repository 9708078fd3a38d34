"""`manage.py add_account`: a person, their organisation and a key, for whoever runs the server.

Invariant: the password is read from standard input and the key is printed once, as JSON; neither is ever an argument,
which other users of the machine could read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from allauth.account.models import EmailAddress
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.validators import validate_email
from django.db import transaction

from marketplace.accounts import services
from marketplace.accounts.access import Actor
from marketplace.accounts.models import Membership, Role, User
from marketplace.core.clock import database_now


class Command(BaseCommand):
    help = "Add a person with a verified address, an organisation they own, and an API key. Password on standard input."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email")
        parser.add_argument("organisation", help="its name")
        parser.add_argument("--key-name", default="first key")
        parser.add_argument("--key-days", type=int, default=services.KEY_DAYS_DEFAULT)

    def handle(self, *args: Any, **options: Any) -> None:
        email = User.objects.normalize_email(options["email"]).lower()
        password = sys.stdin.readline().rstrip("\n")
        try:
            validate_email(email)
            validate_password(password, User(email=email))
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        if User.objects.filter(email__iexact=email).exists():
            raise CommandError(f"there is already an account of {email}")
        with transaction.atomic():
            user = User.objects.create_user(email, password)
            EmailAddress.objects.create(user=user, email=email, verified=True, primary=True)
            organisation = services.create_organisation(user, name=options["organisation"])
            membership = Membership.objects.get(user=user, organisation=organisation)
            issued = services.issue_key(
                Actor.of_membership(membership),
                name=options["key_name"],
                role=Role.OWNER,
                expires_in_days=options["key_days"],
                created_by=user,
                now=database_now(),
            )
        self.stdout.write(json.dumps({"organisation_id": organisation.id, "api_key": issued.secret}))
