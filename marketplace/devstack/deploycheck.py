"""Django's deployment checks under the settings a deployment has, not a developer's: run by `make check`."""

from __future__ import annotations

import os

from marketplace.devstack.services import COMMON_VARIABLES

# Nothing is connected to; the values only have to be of the right shape.
EXAMPLE = {
    "DATABASE_URL": "postgresql://archipelago:example@127.0.0.1:1/archipelago",
    "BROKER_URL": "redis://127.0.0.1:1/0",
    "SECRET_KEY": "a-key-of-the-length-and-the-variety-that-a-deployment-would-choose-0123456789",
    "PUBLIC_URL": "https://archipelago.example",
    "STRIPE_SECRET_KEY": "sk_test_example",
    "STRIPE_WEBHOOK_SECRETS": "whsec_example",
}


def main() -> None:
    assert set(EXAMPLE) == set(COMMON_VARIABLES)  # noqa: S101 - a check of this check
    for name in COMMON_VARIABLES:
        os.environ.pop(f"{name}_FILE", None)
    os.environ.update(EXAMPLE, DJANGO_SETTINGS_MODULE="marketplace.settings", DEBUG="0")

    import django
    from django.core.management import call_command

    django.setup()
    call_command("check", deploy=True, fail_level="WARNING")


if __name__ == "__main__":
    main()
