from django.apps import AppConfig


class TradingConfig(AppConfig):
    name = "marketplace.trading"
    label = "trading"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from marketplace.catalog.hooks import register_own_offers
        from marketplace.fleet import hooks
        from marketplace.trading import selectors
        from marketplace.trading.offers import own_offers
        from marketplace.trading.services import serving

        register_own_offers("trading/_own_offers.html", own_offers)
        hooks.register(
            assignments=serving.reservations,
            beat=serving.observe_island_beat,
            usage=serving.take_island_usage,
            holders=serving.holders,
        )
        hooks.register_section("trading/_island_sales.html", selectors.sales_of)
