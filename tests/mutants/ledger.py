"""Bugs put into the ledger on purpose, one at a time: the state machine of tests/marketplace/billing/test_machine.py
must find every one.

    python -m tests.mutants.ledger          (or: make mutants)

Exit code 1 names those that lived. Each is made inside the test's own transaction and is gone with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from django.db import connection

VARIABLE = "LEDGER_MUTANT"
TEST = "test_whatever_is_posted_in_whatever_order_the_ledger_is_what_the_model_is"
FILE = "tests/marketplace/billing/test_machine.py"
FLOOR = "ledger_account_floor"
NO_GUARD = "DROP TRIGGER account_balanced ON billing_ledgeraccount"


def _sql(*statements: str) -> Callable[[], None]:
    def apply() -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    return apply


def _rewritten(function: str, old: str, new: str, *statements: str) -> Callable[[], None]:
    """The function with another text in one place, and what else has to give way for the bug to be one."""

    def apply() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = %s", [function])
            (text,) = cursor.fetchone()
            if text.count(old) != 1:
                raise LookupError(f"{function} has {text.count(old)} places of {old!r}")
            for statement in statements:
                cursor.execute(statement)
            cursor.execute(text.replace(old, new))

    return apply


_AGAIN = """
            UPDATE billing_ledgeraccount SET
                debits_posted_uusd = debits_posted_uusd + CASE WHEN id = v_debit THEN v_amount ELSE 0 END,
                credits_posted_uusd = credits_posted_uusd + CASE WHEN id = v_credit THEN v_amount ELSE 0 END
             WHERE id IN (v_debit, v_credit);
            CONTINUE;
        END IF;
        IF v_amount > 1000000000000000"""

MUTANTS: dict[str, Callable[[], None]] = {
    "no floor": _sql(f"ALTER TABLE billing_ledgeraccount DROP CONSTRAINT {FLOOR}"),
    "the floor ignores what is pending": _sql(
        f"ALTER TABLE billing_ledgeraccount DROP CONSTRAINT {FLOOR}",
        f"ALTER TABLE billing_ledgeraccount ADD CONSTRAINT {FLOOR} CHECK (floor_uusd IS NULL"
        " OR normal = 'C' AND credits_posted_uusd >= debits_posted_uusd + floor_uusd"
        " OR normal = 'D' AND debits_posted_uusd >= credits_posted_uusd + floor_uusd)",
    ),
    "a pending transfer is resolved twice": _sql(
        "ALTER TABLE billing_transfer DROP CONSTRAINT billing_transfer_pending_id_key",
        "ALTER TABLE billing_ledgeraccount DROP CONSTRAINT ledger_account_sums_not_negative",
    ),
    "a void forgets one side": _rewritten(
        "ledger_post",
        "CASE WHEN id = v_credit THEN pended ELSE 0 END",
        "CASE WHEN id = v_credit AND v_phase <> 'V' THEN pended ELSE 0 END",
        NO_GUARD,
    ),
    "a replay is applied twice": _rewritten(
        "ledger_post", "\n            CONTINUE;\n        END IF;\n        IF v_amount > 1000000000000000", _AGAIN
    ),
    "a changed replay passes": _rewritten(
        "ledger_post",
        "RAISE EXCEPTION 'transfer % was posted with other content', v_id\n"
        "                    USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_changed_replay';",
        "CONTINUE;",
    ),
    "a confirmation of a part keeps the rest pending": _rewritten(
        "ledger_post", "pended := -held.amount_uusd;", "pended := -v_amount;"
    ),
    "a set forgets what it credits": _rewritten(
        "ledger_post_set", "UNION ALL SELECT credit, 0, amount_uusd", "UNION ALL SELECT credit, 0, 0", NO_GUARD
    ),
    "a set applies a replay": _rewritten(
        "ledger_post_set",
        "FROM (SELECT debit AS account, amount_uusd AS debits, 0 AS credits FROM unnest(entries)\n"
        "                    UNION ALL SELECT credit, 0, amount_uusd FROM unnest(entries)) sides",
        "FROM (SELECT debit AS account, amount_uusd AS debits, 0 AS credits"
        " FROM jsonb_populate_recordset(NULL::ledger_single, batch)\n"
        "                    UNION ALL SELECT credit, 0, amount_uusd"
        " FROM jsonb_populate_recordset(NULL::ledger_single, batch)) sides",
    ),
}


def apply_chosen() -> None:
    """In the test's process: the bug that the environment names, if it names one."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        MUTANTS[chosen]()


def _run(target: str, mutant: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", target]
    environment = os.environ | {VARIABLE: mutant, "CI": "1"}
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def main() -> None:
    # The whole file: also that each mutant still is one, so that none is called killed for want of what it changes.
    sound = _run(FILE)
    if sound.returncode:
        raise SystemExit(f"the ledger as it is does not pass:\n{sound.stdout[-3000:]}")
    lived = []
    for name in MUTANTS:
        killed = _run(f"{FILE}::{TEST}", name).returncode == 1
        print(f"{'killed' if killed else 'LIVED':6}  {name}", flush=True)
        if not killed:
            lived.append(name)
    if lived:
        raise SystemExit(f"{len(lived)} of {len(MUTANTS)} lived")
    print(f"all {len(MUTANTS)} were killed")


if __name__ == "__main__":
    main()
