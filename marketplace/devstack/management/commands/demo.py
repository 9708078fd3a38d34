"""`manage.py demo`: the main job end to end on this machine. Exit code 0 only if all of it is true."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from marketplace.devstack import forget
from marketplace.devstack.demo.story import Story
from marketplace.devstack.demo.voice import Voice
from marketplace.devstack.postgres import PostgresError
from marketplace.devstack.stack import AlreadyRunning, Stack
from marketplace.devstack.state import DEFAULT_STATE, StateDir
from marketplace.devstack.supervise import ServiceFailed
from marketplace.devstack.valkey import ValkeyError

# How often the demo's agents call: seconds instead of a deployment's, so that a lost island is told in this hour.
SYNC_MS = "1000"


class Command(BaseCommand):
    help = "Train a model on islands that come and go, on this machine, and check every cent of it."
    requires_system_checks: list[str] = []  # the database they would ask for is what this starts

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="port of the web server; 0: any (default: 8000)")
        parser.add_argument("--state", type=Path, help="state folder, emptied first (default: .archipelago/demo)")
        parser.add_argument("--pictures", type=Path, metavar="DIR", help="keep pictures of its pages there")
        parser.add_argument("--stay", action="store_true", help="keep the stack up afterwards, until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        state = StateDir((options["state"] or DEFAULT_STATE / "demo").resolve())
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            forget.forget(state)
            held = self._run(state, Voice(), port=options["port"], stay=options["stay"], pictures=options["pictures"])
        except KeyboardInterrupt:
            raise CommandError("interrupted; everything it started is stopped") from None
        except (AlreadyRunning, forget.StillRuns, ServiceFailed, PostgresError, ValkeyError) as error:
            raise CommandError(str(error)) from error
        if not held:
            sys.exit(1)

    def _run(self, state: StateDir, voice: Voice, *, port: int, stay: bool, pictures: Path | None) -> bool:
        env = {"ARCHIPELAGO_FLEET_SYNC_MS": SYNC_MS}
        with Stack(state, web_port=port, debug=False, env=env) as stack:
            voice.say(
                "stack is up", f"{stack.web_url}   PostgreSQL, Valkey, web, worker, beat; logs in {_short(state.logs)}"
            )
            story = Story(stack, voice, state.path / "agents", pictures=pictures)
            try:
                story.tell()
            except Exception as error:
                # Whatever went wrong is the demo's result, told with where to look; the stack still has to come down.
                voice.say("demo failed", str(error) or type(error).__name__)
                voice.say("logs", f"{_short(state.logs)}, agents' in {_short(state.path / 'agents')}")
                raise CommandError("the demo did not reach its end") from error
            finally:
                story.close()
            if stay:
                voice.say("staying up", f"{stack.web_url}   Ctrl-C stops everything")
                signal.pause()
            return story.held


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
