from django.apps import AppConfig


class DevstackConfig(AppConfig):
    name = "marketplace.devstack"
    label = "devstack"
