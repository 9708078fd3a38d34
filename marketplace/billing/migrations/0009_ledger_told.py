"""`ledger_told` posts and, where the ledger refuses, says which rule it was instead of breaking the transaction: what it
tried is undone in the database, so that a caller asks once and needs no savepoint around it.
"""

from django.db import migrations

TOLD = """
CREATE FUNCTION ledger_told(at_once boolean, batch jsonb) RETURNS jsonb LANGUAGE plpgsql AS $body$
DECLARE
    rule text;
    words text;
BEGIN
    IF at_once THEN RETURN to_jsonb(ledger_post_set(batch)); END IF;
    RETURN to_jsonb(ledger_post(batch));
EXCEPTION WHEN integrity_constraint_violation THEN
    GET STACKED DIAGNOSTICS rule = CONSTRAINT_NAME, words = MESSAGE_TEXT;
    RETURN jsonb_build_object('rule', rule, 'words', words);
END $body$;
"""


class Migration(migrations.Migration):
    dependencies = [("billing", "0008_ledger_post_set")]

    operations = [migrations.RunSQL(TOLD, "DROP FUNCTION ledger_told(boolean, jsonb)")]
