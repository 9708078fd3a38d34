"""`manage.py dev`: the whole stack on this machine, up until it is told to stop."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from marketplace.devstack.postgres import PostgresError
from marketplace.devstack.stack import AlreadyRunning, Stack
from marketplace.devstack.state import StateDir
from marketplace.devstack.supervise import Event, ServiceFailed
from marketplace.devstack.valkey import ValkeyError


class Command(BaseCommand):
    help = "Run PostgreSQL, Valkey, migrations, web, worker and beat on this machine; Ctrl-C stops them all."
    requires_system_checks: list[str] = []  # the database they would ask for is what this starts

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="port of the web server; 0: any (default: 8000)")
        parser.add_argument("--state", type=Path, help="state folder (default: ARCHIPELAGO_STATE or .archipelago)")
        parser.add_argument("--no-celery", action="store_true", help="leave out worker and beat")
        parser.add_argument("--no-debug", action="store_true", help="serve as a deployment does: no debug pages")
        parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")

    def handle(self, *args: Any, **options: Any) -> None:
        state = StateDir(options["state"].resolve()) if options["state"] else StateDir.from_environ()
        stop = threading.Event()
        received: list[int] = []

        def asked(number: int, frame: object) -> None:
            received.append(number)
            stop.set()
            if len(received) == 1 and not up.is_set():
                # Still coming up: leave through the stack's own door.
                raise KeyboardInterrupt

        up = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, asked)
        say = self._json if options["json"] else self._line
        stack = Stack(
            state,
            web_port=options["port"],
            celery=not options["no_celery"],
            debug=not options["no_debug"],
            on_event=say,
        )
        try:
            with stack:
                up.set()
                self._up(stack, as_json=options["json"])
                stop.wait()
        except (AlreadyRunning, ServiceFailed, PostgresError, ValkeyError) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            self.stderr.write("stopped while starting")

    def _line(self, event: Event) -> None:
        self.stdout.write(event.line())
        self.stdout.flush()

    def _json(self, event: Event) -> None:
        said = {"at": event.at.isoformat(), "service": event.service, "what": event.what, "detail": event.detail}
        self.stdout.write(json.dumps(said))
        self.stdout.flush()

    def _up(self, stack: Stack, *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps({"url": stack.web_url, "state": str(stack.state.path)}))
        else:
            self.stdout.write(self.style.SUCCESS(f"\nArchipelago is up: {stack.web_url}"))
            self.stdout.write(f"logs in {stack.state.logs}; Ctrl-C stops everything\n")
        self.stdout.flush()
