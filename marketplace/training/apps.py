from django.apps import AppConfig


class TrainingConfig(AppConfig):
    name = "marketplace.training"
    label = "training"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from marketplace.fleet import hooks
        from marketplace.training.services import serving

        hooks.register(assignments=serving.assignments, processes=serving.take_processes)
