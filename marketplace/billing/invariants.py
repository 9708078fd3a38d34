"""The audit: what must be true of the ledger at every moment, as set-based SQL.

Invariant: each check returns the rows that break it, so an empty answer is the proof; none writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

CHECKS = {
    "I1 debits equal credits": """
        SELECT 'ledger' FROM billing_ledgeraccount
        HAVING sum(debits_posted_uusd) <> sum(credits_posted_uusd)
            OR sum(debits_pending_uusd) <> sum(credits_pending_uusd)
    """,
    "I2 stored balances are the fold of the transfers": """
        WITH moves AS (
            SELECT t.*, CASE WHEN phase IN ('S', 'C') THEN t.amount_uusd ELSE 0 END AS posted,
                   CASE WHEN phase = 'P' AND NOT EXISTS (SELECT FROM billing_transfer r WHERE r.pending_id = t.id)
                        THEN t.amount_uusd ELSE 0 END AS pended
              FROM billing_transfer t),
        d AS (SELECT debit_id AS id, sum(posted) AS posted, sum(pended) AS pended FROM moves GROUP BY 1),
        c AS (SELECT credit_id AS id, sum(posted) AS posted, sum(pended) AS pended FROM moves GROUP BY 1)
        SELECT a.id::text FROM billing_ledgeraccount a LEFT JOIN d USING (id) LEFT JOIN c USING (id)
         WHERE (a.debits_posted_uusd, a.debits_pending_uusd, a.credits_posted_uusd, a.credits_pending_uusd)
            <> (coalesce(d.posted, 0), coalesce(d.pended, 0), coalesce(c.posted, 0), coalesce(c.pended, 0))
    """,
    "I3 no account is below its floor": """
        SELECT id::text FROM billing_ledgeraccount WHERE floor_uusd > CASE normal
            WHEN 'C' THEN credits_posted_uusd - debits_posted_uusd - debits_pending_uusd
            ELSE debits_posted_uusd - credits_posted_uusd - credits_pending_uusd END
    """,
    "I7 a closed meter leaves its escrow empty": """
        SELECT m.id FROM billing_meter m JOIN billing_ledgeraccount a ON a.id = m.escrow_id
         WHERE m.state = 'closed' AND a.credits_posted_uusd <> a.debits_posted_uusd
           AND NOT EXISTS (SELECT FROM billing_meter o WHERE o.escrow_id = m.escrow_id AND o.state = 'open')
    """,
    "I8 captures and fees are the charge exactly": """
        WITH paid AS (
            SELECT ref, sum(amount_uusd) AS total, sum(amount_uusd) FILTER (WHERE kind = 31) AS fee
              FROM billing_transfer WHERE kind IN (30, 31) GROUP BY ref)
        SELECT m.id FROM billing_meter m LEFT JOIN paid p ON p.ref = m.id
         WHERE coalesce(p.total, 0) <> m.charged_uusd OR coalesce(p.fee, 0) <> m.fee_uusd
            OR m.charged_uusd <> div(m.rate_uusd_per_gpu_hour::numeric * m.billable_gpu_ms, 3600000)
            OR m.fee_uusd <> div(m.charged_uusd::numeric * m.fee_bps, 10000)
    """,
    "I9 nothing is billed beyond the window or unseen": """
        SELECT id FROM billing_meter
         WHERE billable_gpu_ms > covered_gpu_ms
            OR billable_gpu_ms > gpus * (extract(epoch FROM end_at - start_at) * 1000 + 1)
    """,
}


@dataclass(frozen=True)
class Breach:
    invariant: str
    subject: str  # the account or meter


def breaches() -> list[Breach]:
    """Every row that breaks an invariant; none is the normal answer."""
    found = []
    with connection.cursor() as cursor:
        for name, sql in CHECKS.items():
            cursor.execute(sql)
            found += [Breach(name, subject) for (subject,) in cursor.fetchall()]
    return found
