from importlib import import_module

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "marketplace.accounts"
    label = "accounts"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Receivers and the OpenAPI description of our keys register themselves on import.
        import_module("marketplace.accounts.signals")
        import_module("marketplace.accounts.api_schema")
