"""The audit: what must be true of the ledger at every moment, and what somebody must look at, as set-based SQL.

I4 (a transfer is never changed) and I5 (a replay is nothing, a changed replay an error) are kept by the database as it
writes: there is no row to look for. I10 is held against the payment provider, in `services.books`.
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
    "I6 a pending transfer is resolved once": """
        SELECT pending_id::text FROM billing_transfer WHERE pending_id IS NOT NULL
         GROUP BY pending_id HAVING count(*) > 1
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
    "I12 what an open meter may still charge is held": """
        SELECT m.id FROM billing_meter m JOIN billing_ledgeraccount a ON a.id = m.escrow_id
         WHERE m.state = 'open' AND a.credits_posted_uusd - a.debits_posted_uusd
             < div(m.rate_uusd_per_gpu_hour::numeric * m.gpus
                   * floor(extract(epoch FROM m.end_at - m.start_at) * 1000), 3600000) - m.charged_uusd
    """,
    "I14 nothing is posted to a closed account": """
        SELECT t.id::text FROM billing_transfer t JOIN billing_ledgeraccount a ON a.id IN (t.debit_id, t.credit_id)
         WHERE a.closed_at < t.created_at
    """,
    "I15 what was sold on is paid for by who sold it": """
        SELECT u.id FROM billing_meter u
          JOIN (SELECT upstream_id AS id, sum(billable_gpu_ms) AS sold FROM billing_meter
                 WHERE upstream_id IS NOT NULL GROUP BY 1) r USING (id)
         WHERE r.sold > u.billable_gpu_ms
    """,
    "I16 what matured and what was refunded is what the transfers say": """
        WITH moved AS (
            SELECT t.ref, sum(t.amount_uusd) FILTER (WHERE t.kind IN (50, 51)) AS matured,
                   sum(t.amount_uusd) FILTER (WHERE t.kind IN (40, 41)) AS refunded,
                   sum(t.amount_uusd) FILTER (WHERE t.kind = 41) AS fee,
                   sum(t.amount_uusd) FILTER (WHERE t.kind = 40 AND a.kind = 'seller_accrued') AS early
              FROM billing_transfer t JOIN billing_ledgeraccount a ON a.id = t.debit_id
             WHERE t.kind IN (40, 41, 50, 51) GROUP BY 1)
        SELECT m.id FROM billing_meter m LEFT JOIN moved ON moved.ref = m.id
         WHERE (m.matured_uusd, m.refunded_uusd, m.fee_refunded_uusd, m.unmatured_refunds_uusd)
            <> (coalesce(matured, 0), coalesce(refunded, 0), coalesce(fee, 0), coalesce(early, 0))
    """,
}

# True in a healthy business, and no proof of a broken ledger where they are not.
ALARMS = {
    "I11 we could pay everybody at once": """
        WITH have AS (SELECT coalesce(sum(debits_posted_uusd - credits_posted_uusd), 0) AS uusd
                        FROM billing_ledgeraccount WHERE kind IN ('stripe_pending', 'stripe_available', 'bank')),
        owe AS (SELECT coalesce(sum(credits_posted_uusd - debits_posted_uusd), 0) AS uusd FROM billing_ledgeraccount
                 WHERE kind IN ('buyer_cash', 'buyer_promo', 'escrow', 'seller_accrued', 'seller_payable',
                                'seller_reserve'))
        SELECT 'short of ' || (owe.uusd - have.uusd) FROM have, owe WHERE owe.uusd > have.uusd
    """,
    "I13 nothing pends for more than three days": """
        SELECT t.id::text FROM billing_transfer t WHERE t.phase = 'P' AND t.effective_at < now() - interval '3 days'
           AND NOT EXISTS (SELECT FROM billing_transfer r WHERE r.pending_id = t.id)
    """,
}


@dataclass(frozen=True)
class Breach:
    invariant: str
    subject: str  # the account or meter


def breaches() -> list[Breach]:
    """Every row that breaks an invariant; none is the normal answer."""
    return _found(CHECKS)


def alarms() -> list[Breach]:
    """What an operator has to look at."""
    return _found(ALARMS)


def _found(checks: dict[str, str]) -> list[Breach]:
    found = []
    with connection.cursor() as cursor:
        for name, sql in checks.items():
            cursor.execute(sql)
            found += [Breach(name, subject) for (subject,) in cursor.fetchall()]
    return found
