"""The set-based form of `ledger_post`, for metering: thousands of transfers, posted at once, in a handful of statements.

The same rules: every account that is touched is locked in id order; the same id with the same content is nothing new,
with other content an error; a closed account, mixed currencies, an account below its floor refuse all of it. It knows
no pending transfers, and an id stands in a batch once.
"""

from django.db import migrations

POST_SET = """
CREATE TYPE ledger_single AS (
    id uuid, kind smallint, debit bigint, credit bigint, amount_uusd bigint, journal_id uuid, ref text,
    effective_at timestamptz);

CREATE FUNCTION ledger_post_set(batch jsonb) RETURNS integer
LANGUAGE plpgsql SET archipelago.ledger_post = 'on' AS $body$
DECLARE
    entries ledger_single[];
    refused uuid;
BEGIN
    SELECT array_agg(e) INTO entries FROM jsonb_populate_recordset(NULL::ledger_single, batch) e;
    PERFORM 1 FROM billing_ledgeraccount
     WHERE id IN (SELECT debit FROM unnest(entries) UNION SELECT credit FROM unnest(entries))
     ORDER BY id FOR NO KEY UPDATE;
    SELECT e.id INTO refused FROM unnest(entries) e JOIN billing_transfer t USING (id)
     WHERE (t.kind, t.phase, t.debit_id, t.credit_id, t.amount_uusd, t.ref)
           IS DISTINCT FROM (e.kind, 'S', e.debit, e.credit, e.amount_uusd, e.ref)
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'transfer % was posted with other content', refused
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_changed_replay';
    END IF;
    SELECT array_agg(e) INTO entries FROM unnest(entries) e
     WHERE NOT EXISTS (SELECT FROM billing_transfer t WHERE t.id = e.id);
    SELECT e.id INTO refused FROM unnest(entries) e
      JOIN billing_ledgeraccount d ON d.id = e.debit JOIN billing_ledgeraccount c ON c.id = e.credit
     WHERE d.closed_at IS NOT NULL OR c.closed_at IS NOT NULL OR d.currency <> c.currency
        OR e.amount_uusd > 1000000000000000
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'transfer %: closed account, mixed currencies or too large', refused
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_refused';
    END IF;
    INSERT INTO billing_transfer (id, kind, phase, debit_id, credit_id, amount_uusd, journal_id, ref, effective_at)
    SELECT id, kind, 'S', debit, credit, amount_uusd, journal_id, ref, coalesce(effective_at, clock_timestamp())
      FROM unnest(entries);
    UPDATE billing_ledgeraccount a
       SET debits_posted_uusd = a.debits_posted_uusd + m.debits, credits_posted_uusd = a.credits_posted_uusd + m.credits
      FROM (SELECT account, sum(debits) AS debits, sum(credits) AS credits
              FROM (SELECT debit AS account, amount_uusd AS debits, 0 AS credits FROM unnest(entries)
                    UNION ALL SELECT credit, 0, amount_uusd FROM unnest(entries)) sides
             GROUP BY account) m
     WHERE a.id = m.account;
    RETURN coalesce(cardinality(entries), 0);
END $body$;
"""


class Migration(migrations.Migration):
    dependencies = [("billing", "0007_ledger_checks")]

    operations = [migrations.RunSQL(POST_SET, "DROP FUNCTION ledger_post_set(jsonb); DROP TYPE ledger_single")]
