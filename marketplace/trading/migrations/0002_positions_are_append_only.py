"""Contracts and positions are append-only, kept so by the database."""

from django.db import migrations

FORWARD = """
CREATE FUNCTION trading_rows_are_only_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%: rows are only ever added, % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER rows_are_only_added BEFORE UPDATE OR DELETE ON trading_contract
    FOR EACH ROW EXECUTE FUNCTION trading_rows_are_only_added();
CREATE TRIGGER rows_are_only_added BEFORE UPDATE OR DELETE ON trading_position
    FOR EACH ROW EXECUTE FUNCTION trading_rows_are_only_added();
"""
BACKWARD = """
DROP TRIGGER rows_are_only_added ON trading_contract;
DROP TRIGGER rows_are_only_added ON trading_position;
DROP FUNCTION trading_rows_are_only_added();
"""


class Migration(migrations.Migration):
    dependencies = [("trading", "0001_initial")]

    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
