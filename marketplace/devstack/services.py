"""What runs, with which command and variables: one source for the embedded stack, docker-compose.yml and its test.

Pure data. A command starts with "python"; whoever runs it puts the interpreter of the place there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PYTHON = "python"

# What every process of ours must be told in a deployment, where nothing secret has a default.
COMMON_VARIABLES = (
    "DATABASE_URL",
    "BROKER_URL",
    "SECRET_KEY",
    "PUBLIC_URL",
    "STRIPE_SECRET_KEY",
    "STRIPE_WEBHOOK_SECRETS",
)
# Where artifacts lie: a folder all of them see, or a bucket.
DISK_VARIABLES = ("ARTIFACT_DIR",)
BUCKET_VARIABLES = ("S3_BUCKET", "S3_ENDPOINT_URL", "S3_REGION", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY")


@dataclass(frozen=True)
class Service:
    """A process of ours. `variables` are its own, beside the common ones, with the value that fits its work."""

    name: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def web(bind: str) -> Service:
    """One process of several threads: requests wait on the database, not on Python. WEB_CONCURRENCY adds processes."""
    return Service(
        "web",
        (
            PYTHON, "-m", "gunicorn", "marketplace.wsgi:application",
            "--bind", bind,
            "--worker-class", "gthread",
            "--threads", "8",
            "--timeout", "60",
            "--graceful-timeout", "10",
            "--keep-alive", "75",
            "--no-control-socket",
        ),
        (("DB_APPLICATION_NAME", "archipelago-web"),),
    )  # fmt: skip


def worker(queues: Sequence[str]) -> Service:
    """Threads, because tasks wait on the database and on payment providers."""
    return Service(
        "worker",
        (
            PYTHON, "-m", "celery", "--app", "marketplace", "worker",
            "--pool", "threads",
            "--concurrency", "4",
            "--queues", ",".join(queues),
            "--loglevel", "WARNING",
            "--without-gossip",
            "--without-mingle",
        ),
        (("DB_APPLICATION_NAME", "archipelago-worker"), ("DB_STATEMENT_TIMEOUT_MS", "30000")),
    )  # fmt: skip


def beat(schedule_file: str) -> Service:
    return Service(
        "beat",
        (
            PYTHON, "-m", "celery", "--app", "marketplace", "beat",
            "--loglevel", "WARNING",
            "--schedule", schedule_file,
            "--pidfile", "",
        ),
        (("DB_APPLICATION_NAME", "archipelago-beat"),),
    )  # fmt: skip


def migrate() -> Service:
    """Run once before the others; a migration may take its time, but waits for no lock that traffic holds."""
    return Service(
        "migrate",
        (PYTHON, "manage.py", "migrate", "--noinput"),
        (
            ("DB_APPLICATION_NAME", "archipelago-migrate"),
            ("DB_STATEMENT_TIMEOUT_MS", "0"),
            ("DB_LOCK_TIMEOUT_MS", "10000"),
        ),
    )


def stripe_fake(port: int) -> Service:
    """The stateful stand-in for Stripe, over real HTTP; for machines that hold no real key."""
    return Service("stripe", (PYTHON, "-m", "tests.fakes.stripe", "--port", str(port)))
