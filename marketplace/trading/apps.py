from django.apps import AppConfig


class TradingConfig(AppConfig):
    name = "marketplace.trading"
    label = "trading"
    default_auto_field = "django.db.models.BigAutoField"
