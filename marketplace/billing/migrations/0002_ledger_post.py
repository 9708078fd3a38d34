"""One writer for the ledger, and triggers that refuse every other way to change it.

`ledger_post` carries a setting of its own while it runs (a SET clause, so it ends with the function, not with the
transaction); the triggers refuse a write to the ledger without it.
"""

from django.db import migrations

POST = """
CREATE FUNCTION ledger_post(batch jsonb) RETURNS integer
LANGUAGE plpgsql SET archipelago.ledger_post = 'on' AS $body$
DECLARE
    entry jsonb;
    known billing_transfer%ROWTYPE;
    held billing_transfer%ROWTYPE;
    added integer := 0;
    posted bigint;
    pended bigint;
    v_id uuid; v_phase text; v_debit bigint; v_credit bigint; v_amount bigint; v_pending uuid;
BEGIN
    -- In id order, so that two batches cannot wait for each other.
    PERFORM 1 FROM billing_ledgeraccount
     WHERE id IN (SELECT (e->>'debit')::bigint FROM jsonb_array_elements(batch) e
                  UNION SELECT (e->>'credit')::bigint FROM jsonb_array_elements(batch) e)
     ORDER BY id FOR NO KEY UPDATE;
    FOR entry IN SELECT * FROM jsonb_array_elements(batch) LOOP
        v_id := entry->>'id'; v_phase := entry->>'phase'; v_amount := entry->>'amount_uusd';
        v_debit := entry->>'debit'; v_credit := entry->>'credit'; v_pending := entry->>'pending';
        SELECT * INTO known FROM billing_transfer WHERE id = v_id;
        IF FOUND THEN
            IF (known.kind, known.phase, known.debit_id, known.credit_id, known.amount_uusd, known.ref)
               IS DISTINCT FROM ((entry->>'kind')::smallint, v_phase, v_debit, v_credit, v_amount, entry->>'ref')
               OR known.pending_id IS DISTINCT FROM v_pending THEN
                RAISE EXCEPTION 'transfer % was posted with other content', v_id
                    USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_changed_replay';
            END IF;
            CONTINUE;
        END IF;
        IF v_amount > 1000000000000000 OR EXISTS (SELECT FROM billing_ledgeraccount
                   WHERE id IN (v_debit, v_credit) AND closed_at IS NOT NULL)
           OR (SELECT count(DISTINCT currency) FROM billing_ledgeraccount WHERE id IN (v_debit, v_credit)) <> 1 THEN
            RAISE EXCEPTION 'transfer %: closed account, mixed currencies or too large', v_id
                USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_refused';
        END IF;
        posted := 0; pended := 0;
        IF v_phase = 'S' THEN posted := v_amount;
        ELSIF v_phase = 'P' THEN pended := v_amount;
        ELSE
            SELECT * INTO held FROM billing_transfer WHERE id = v_pending;
            IF NOT FOUND OR held.phase <> 'P' OR (held.debit_id, held.credit_id) <> (v_debit, v_credit)
               OR v_amount > held.amount_uusd OR (v_phase = 'V' AND v_amount <> held.amount_uusd) THEN
                RAISE EXCEPTION 'transfer % does not fit the pending one', v_id
                    USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_refused';
            END IF;
            -- A confirmation of less than was pending frees the rest.
            pended := -held.amount_uusd;
            IF v_phase = 'C' THEN posted := v_amount; END IF;
        END IF;
        INSERT INTO billing_transfer (id, kind, phase, debit_id, credit_id, amount_uusd, pending_id, journal_id, ref,
                                      effective_at)
        VALUES (v_id, (entry->>'kind')::smallint, v_phase, v_debit, v_credit, v_amount, v_pending,
                (entry->>'journal_id')::uuid, entry->>'ref',
                coalesce((entry->>'effective_at')::timestamptz, clock_timestamp()));
        UPDATE billing_ledgeraccount SET
            debits_posted_uusd = debits_posted_uusd + CASE WHEN id = v_debit THEN posted ELSE 0 END,
            debits_pending_uusd = debits_pending_uusd + CASE WHEN id = v_debit THEN pended ELSE 0 END,
            credits_posted_uusd = credits_posted_uusd + CASE WHEN id = v_credit THEN posted ELSE 0 END,
            credits_pending_uusd = credits_pending_uusd + CASE WHEN id = v_credit THEN pended ELSE 0 END
         WHERE id IN (v_debit, v_credit);
        added := added + 1;
    END LOOP;
    RETURN added;
END $body$;
"""

GUARDS = """
CREATE FUNCTION ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    RAISE EXCEPTION '% of % is refused: the ledger is append-only and ledger_post is its one writer', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_one_writer';
END $body$;

CREATE FUNCTION ledger_balanced() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    -- Every account opens at zero, so a statement that moves both sides alike keeps the whole ledger at zero.
    IF (SELECT sum(n.debits_posted_uusd - o.debits_posted_uusd - n.credits_posted_uusd + o.credits_posted_uusd) <> 0
            OR sum(n.debits_pending_uusd - o.debits_pending_uusd - n.credits_pending_uusd + o.credits_pending_uusd) <> 0
          FROM before o JOIN after n USING (id)) THEN
        RAISE EXCEPTION 'debits and credits differ'
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_balanced';
    END IF;
    RETURN NULL;
END $body$;

CREATE TRIGGER transfer_append_only BEFORE UPDATE OR DELETE ON billing_transfer
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse();
CREATE TRIGGER transfer_no_truncate BEFORE TRUNCATE ON billing_transfer
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse();
CREATE TRIGGER transfer_one_writer BEFORE INSERT ON billing_transfer FOR EACH ROW
    WHEN (current_setting('archipelago.ledger_post', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION ledger_refuse();
CREATE TRIGGER account_opens_empty BEFORE INSERT ON billing_ledgeraccount FOR EACH ROW
    WHEN (NEW.debits_pending_uusd <> 0 OR NEW.debits_posted_uusd <> 0
          OR NEW.credits_pending_uusd <> 0 OR NEW.credits_posted_uusd <> 0)
    EXECUTE FUNCTION ledger_refuse();
CREATE TRIGGER account_one_writer BEFORE UPDATE ON billing_ledgeraccount FOR EACH ROW
    WHEN (current_setting('archipelago.ledger_post', true) IS DISTINCT FROM 'on' AND
          (OLD.debits_pending_uusd, OLD.debits_posted_uusd, OLD.credits_pending_uusd, OLD.credits_posted_uusd,
           OLD.kind, OLD.organisation_id, OLD.ref, OLD.currency, OLD.normal) IS DISTINCT FROM
          (NEW.debits_pending_uusd, NEW.debits_posted_uusd, NEW.credits_pending_uusd, NEW.credits_posted_uusd,
           NEW.kind, NEW.organisation_id, NEW.ref, NEW.currency, NEW.normal))
    EXECUTE FUNCTION ledger_refuse();
CREATE TRIGGER account_balanced AFTER UPDATE ON billing_ledgeraccount
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_balanced();
"""


class Migration(migrations.Migration):
    dependencies = [("billing", "0001_initial")]

    operations = [
        migrations.RunSQL(POST, "DROP FUNCTION ledger_post(jsonb)"),
        migrations.RunSQL(
            GUARDS,
            """
            DROP TRIGGER transfer_append_only ON billing_transfer;
            DROP TRIGGER transfer_no_truncate ON billing_transfer;
            DROP TRIGGER transfer_one_writer ON billing_transfer;
            DROP TRIGGER account_opens_empty ON billing_ledgeraccount;
            DROP TRIGGER account_one_writer ON billing_ledgeraccount;
            DROP TRIGGER account_balanced ON billing_ledgeraccount;
            DROP FUNCTION ledger_balanced();
            DROP FUNCTION ledger_refuse();
            """,
        ),
    ]
