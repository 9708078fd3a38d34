"""The settings of every process, read from the environment.

Three typed helpers read it, and fail loudly: a value that is missing or malformed stops the process with the variable's
name. Each variable NAME can instead be given as NAME_FILE, the path of a file that holds the value (for secrets).
Without DATABASE_URL the process belongs to the embedded stack of this machine (marketplace.devstack) and gets what a
developer wants; with it, the process is a deployment and everything secret must be said.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from csp.constants import NONCE, NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from marketplace.devstack.state import REPOSITORY, StateDir

BASE_DIR = REPOSITORY


def env_text(name: str, default: str | None = None) -> str:
    """The text of a variable, or of the file NAME_FILE names. No default: the process cannot run without it."""
    value, file = os.environ.get(name), os.environ.get(f"{name}_FILE")
    if value and file:
        raise ImproperlyConfigured(f"{name} and {name}_FILE are both set: keep one")
    if file:
        try:
            value = Path(file).read_text().strip()
        except OSError as error:
            raise ImproperlyConfigured(f"{name}_FILE={file} cannot be read: {error.strerror}") from error
    if value:
        return value
    if default is None:
        raise ImproperlyConfigured(f"{name} (or {name}_FILE) must be set")
    return default


def env_int(name: str, default: int | None = None) -> int:
    text = env_text(name, None if default is None else str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{name} must be a whole number, not {text!r}") from error


def env_flag(name: str, default: bool) -> bool:
    text = env_text(name, "1" if default else "0").lower()
    if text not in {"0", "1", "false", "true"}:
        raise ImproperlyConfigured(f"{name} must be 0, 1, false or true, not {text!r}")
    return text in {"1", "true"}


def _list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


# ------------------------------------------------------------------------------------------------------------- where

STATE = StateDir.from_environ()
EMBEDDED = not (os.environ.get("DATABASE_URL") or os.environ.get("DATABASE_URL_FILE"))

DEBUG = env_flag("DEBUG", EMBEDDED)
SECRET_KEY = env_text("SECRET_KEY", STATE.secret("django_key") if EMBEDDED else None)
# Keys that still verify what they signed while a new one takes over.
SECRET_KEY_FALLBACKS = _list(env_text("SECRET_KEY_FALLBACKS", ""))

# The address by which agents, signed links and mails reach us.
PUBLIC_URL = env_text("PUBLIC_URL", "http://127.0.0.1:8000" if EMBEDDED else None).rstrip("/")
HTTPS = PUBLIC_URL.startswith("https://")
PUBLIC_HOST = urlsplit(PUBLIC_URL).hostname or ""
ALLOWED_HOSTS = _list(env_text("ALLOWED_HOSTS", ",".join(dict.fromkeys([PUBLIC_HOST, "127.0.0.1", "localhost"]))))
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL]

# --------------------------------------------------------------------------------------------------------------- code

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.humanize",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "django_htmx",
    "csp",
    "allauth",
    "allauth.account",
    "marketplace.accounts",
    "marketplace.catalog",
    "marketplace.fleet",
    "marketplace.billing",
    "marketplace.trading",
    "marketplace.training",
    "marketplace.devstack",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "marketplace.accounts.middleware.CurrentOrganisation",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "marketplace.core.web.ProblemPages",
]

ROOT_URLCONF = "marketplace.urls"
WSGI_APPLICATION = "marketplace.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "builtins": ["marketplace.core.templatetags.words"],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "csp.context_processors.nonce",
                "marketplace.accounts.navigation.navigation",
            ],
        },
    },
]

# ----------------------------------------------------------------------------------------------------------- database


def _database(url: str) -> dict[str, Any]:
    """A PostgreSQL connection from its URL. Others are refused: constraints and locks here are PostgreSQL's."""
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"} or not parts.path.strip("/"):
        raise ImproperlyConfigured("DATABASE_URL must look like postgresql://user:password@host:port/name")
    # A statement or a lock that waits longer than a person would is worth more as an error than as a stuck thread.
    # Processes with longer work (worker, migrations) say so in their environment.
    limits = {
        "statement_timeout": env_int("DB_STATEMENT_TIMEOUT_MS", 5_000),
        "lock_timeout": env_int("DB_LOCK_TIMEOUT_MS", 3_000),
        "idle_in_transaction_session_timeout": env_int("DB_IDLE_IN_TRANSACTION_TIMEOUT_MS", 60_000),
    }
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "CONN_MAX_AGE": env_int("DB_CONN_MAX_AGE_S", 60),
        # A server that was restarted costs one reconnect, not an error for every idle connection.
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            "application_name": env_text("DB_APPLICATION_NAME", "archipelago"),
            "connect_timeout": 5,
            "options": " ".join(f"-c {name}={value}" for name, value in limits.items()),
            **dict(parse_qsl(parts.query)),
        },
        "TEST": {"NAME": env_text("ARCHIPELAGO_TEST_DB", "test_archipelago")},
    }


DATABASES = {"default": _database(STATE.database_url() if EMBEDDED else env_text("DATABASE_URL"))}

# What is cached is only what can be lost (rate limits, rendered fragments): a process's own memory is enough, and a
# broker that is down must not take sign-in down with it.
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

# ------------------------------------------------------------------------------------------------------------- celery

CELERY_BROKER_URL = env_text("BROKER_URL", STATE.broker_url() if EMBEDDED else None)
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
# A task whose worker died is delivered again; every task is safe to run twice.
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
# Threads cannot be cancelled; a task that outlives its connection finishes, and is safe to run once more.
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
# The rows hold the work: a broker that is away is waited for, at short and constant intervals, for ever.
CELERY_BROKER_CONNECTION_RETRY = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_BROKER_CONNECTION_TIMEOUT = 2
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # An unacknowledged message is delivered again after this; longer than any task may run.
    "visibility_timeout": 600,
    "health_check_interval": 5,
    "socket_timeout": 10,
    "socket_connect_timeout": 2,
    "socket_keepalive": True,
    "retry_on_timeout": True,
}
# Publishing from a request: fail fast, the sweep does the work a little later.
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 1, "interval_start": 0.0, "interval_step": 0.1, "interval_max": 0.1}
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULE_FILENAME = env_text("BEAT_SCHEDULE_FILE", str(STATE.path / "celerybeat-schedule"))

# Off where no broker runs: the sweep alone then moves things (marketplace.core.wake).
WAKE_UPS = env_flag("ARCHIPELAGO_WAKE_UPS", True)

# -------------------------------------------------------------------------------------------------------------- fleet

# How soon an agent is asked to call again; what counts as silence derives from it (marketplace.fleet.liveness).
FLEET_SYNC_MS = env_int("ARCHIPELAGO_FLEET_SYNC_MS", 5_000)

# ----------------------------------------------------------------------------------------------------------- accounts

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_REDIRECT_URL = "/"
LOGIN_URL = "account_login"
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_UNIQUE_EMAIL = True
ACCOUNT_EMAIL_VERIFICATION = env_text("ACCOUNT_EMAIL_VERIFICATION", "optional" if EMBEDDED else "mandatory")
ACCOUNT_LOGOUT_ON_GET = False
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if HTTPS else "http"

# With a folder, mails become files in it: what a developer and the tests read.
EMAIL_DIR = env_text("EMAIL_DIR", str(STATE.mail) if EMBEDDED else "")
EMAIL_BACKEND = f"django.core.mail.backends.{'filebased' if EMAIL_DIR else 'smtp'}.EmailBackend"
EMAIL_FILE_PATH = EMAIL_DIR or None
EMAIL_HOST = env_text("EMAIL_HOST", "localhost")
EMAIL_PORT = env_int("EMAIL_PORT", 25)
EMAIL_HOST_USER = env_text("EMAIL_HOST_USER", "")
EMAIL_HOST_PASSWORD = env_text("EMAIL_HOST_PASSWORD", "")
EMAIL_USE_TLS = env_flag("EMAIL_USE_TLS", False)
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = env_text("DEFAULT_FROM_EMAIL", "Archipelago <hello@localhost>")

# ---------------------------------------------------------------------------------------------------------------- API

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "marketplace.accounts.api_auth.ApiKeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "marketplace.core.errors.drf_exception_handler",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "DATETIME_FORMAT": "%Y-%m-%dT%H:%M:%S.%fZ",
}
# The largest page any list gives, in one request.
PAGE_LIMIT = 100

SPECTACULAR_SETTINGS = {
    "TITLE": "Archipelago API",
    "DESCRIPTION": "Rent GPUs and train across islands. Money is in integer micro-USD (`_uusd`), times are in UTC.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    # Several things have a `state` or a `kind`; each schema is named for whose it is.
    "ENUM_NAME_OVERRIDES": {
        "ArtifactKind": "marketplace.training.models.ArtifactKind",
        "IslandState": "marketplace.fleet.models.IslandState",
        "JobState": "marketplace.training.models.JobState",
        "LeaseState": "marketplace.trading.models.LeaseState",
        "MemberState": "marketplace.training.models.MemberState",
        "OrderState": "marketplace.trading.models.OrderState",
        "TopUpState": "marketplace.billing.models.TopUpState",
    },
}

# -------------------------------------------------------------------------------------------------------------- money

# None means Stripe itself; `manage.py dev` points it at the stateful fake of the tests.
STRIPE_API_BASE: str | None = env_text("STRIPE_API_BASE", "") or None
STRIPE_SECRET_KEY = env_text("STRIPE_SECRET_KEY", "sk_test_embedded" if EMBEDDED else None)
# Several, so that a secret can be rotated without losing an event.
STRIPE_WEBHOOK_SECRETS = _list(env_text("STRIPE_WEBHOOK_SECRETS", "whsec_embedded" if EMBEDDED else None))
# Where the browser goes to pay; it may leave our own pages for no other place.
STRIPE_CHECKOUT_ORIGIN = env_text("STRIPE_CHECKOUT_ORIGIN", STRIPE_API_BASE or "https://checkout.stripe.com")
# Where sellers tell the provider who they are.
STRIPE_CONNECT_ORIGIN = env_text("STRIPE_CONNECT_ORIGIN", STRIPE_API_BASE or "https://connect.stripe.com")

# Our part of what a seller earns, in hundredths of a percent; a lease keeps the one it was rented at.
MARKET_FEE_BPS = env_int("MARKET_FEE_BPS", 500)
# What was earned may be disputed for so long; then it becomes payable.
DISPUTE_WINDOW_HOURS = env_int("DISPUTE_WINDOW_HOURS", 72)
# Of what a seller earns in their first days, a part is kept for a while: for refunds that come late.
SELLER_NEW_DAYS = env_int("SELLER_NEW_DAYS", 30)
SELLER_RESERVE_BPS = env_int("SELLER_RESERVE_BPS", 1_000)
SELLER_RESERVE_DAYS = env_int("SELLER_RESERVE_DAYS", 30)
# Sellers are paid weekly, and not for less; the first time only after so many days, since fraud shows by then.
PAYOUT_LEAST_UUSD = env_int("PAYOUT_LEAST_UUSD", 25_000_000)
FIRST_PAYOUT_DAYS = env_int("FIRST_PAYOUT_DAYS", 7)

# ---------------------------------------------------------------------------------------------------------- artifacts

ARTIFACT_DIR = Path(env_text("ARTIFACT_DIR", str(STATE.artifacts) if EMBEDDED else "/var/lib/archipelago/artifacts"))
# An empty bucket means the local disk.
S3_BUCKET = env_text("S3_BUCKET", "")
S3_ENDPOINT_URL: str | None = env_text("S3_ENDPOINT_URL", "") or None
S3_REGION = env_text("S3_REGION", "us-east-1")
S3_ACCESS_KEY_ID = env_text("S3_ACCESS_KEY_ID", "")
S3_SECRET_ACCESS_KEY = env_text("S3_SECRET_ACCESS_KEY", "")

# ----------------------------------------------------------------------------------------------------------- security

SECURE_SSL_REDIRECT = HTTPS
# Asked by the machine itself, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^healthz$"]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if env_flag("BEHIND_PROXY", False) else None
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = HTTPS
SECURE_HSTS_PRELOAD = HTTPS
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_SECURE = HTTPS
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SECURE = HTTPS
CSRF_COOKIE_HTTPONLY = False
X_FRAME_OPTIONS = "DENY"

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF, NONCE],
        "style-src": [SELF, NONCE],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [NONE],
        "object-src": [NONE],
        # Browsers hold a form's redirects to this too, and a top-up ends on the payment page.
        "form-action": [SELF, STRIPE_CHECKOUT_ORIGIN, STRIPE_CONNECT_ORIGIN],
    },
}

# -------------------------------------------------------------------------------------------- time, language and files

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "marketplace" / "static"]
# In an image the files are collected and named by their hash; elsewhere they are served from where they lie.
STATIC_MANIFEST = env_flag("STATIC_MANIFEST", False)
STATIC_ROOT = BASE_DIR / "staticfiles" if STATIC_MANIFEST else None
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"
        if STATIC_MANIFEST
        else "django.contrib.staticfiles.storage.StaticFilesStorage"
    },
}
WHITENOISE_USE_FINDERS = not STATIC_MANIFEST
WHITENOISE_AUTOREFRESH = DEBUG

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": env_text("LOG_LEVEL", "INFO")},
    # One line a request of ours to others is noise; their failures are raised, not logged.
    "loggers": {name: {"level": "WARNING"} for name in ("httpx", "botocore", "stripe")},
}
