from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0003_agent_misfit"),
    ]

    operations = [
        migrations.AddField(
            model_name="agent",
            name="heard_since",
            field=models.DateTimeField(null=True),
        ),
    ]
