"""Usage reports are append-only, kept so by the database."""

from django.db import migrations

FORWARD = """
CREATE FUNCTION fleet_rows_are_only_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%: rows are only ever added, % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER rows_are_only_added BEFORE UPDATE OR DELETE ON fleet_usagereport
    FOR EACH ROW EXECUTE FUNCTION fleet_rows_are_only_added();
"""
BACKWARD = """
DROP TRIGGER rows_are_only_added ON fleet_usagereport;
DROP FUNCTION fleet_rows_are_only_added();
"""


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial")]

    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
