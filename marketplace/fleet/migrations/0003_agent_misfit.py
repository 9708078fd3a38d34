from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0002_usage_is_append_only"),
    ]

    operations = [
        migrations.AddField(
            model_name="agent",
            name="misfit",
            field=models.CharField(blank=True, max_length=300),
        ),
    ]
