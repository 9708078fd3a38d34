"""What the state machines have in common."""

from __future__ import annotations

from django.db import transaction
from hypothesis.stateful import RuleBasedStateMachine


class RolledBack(RuleBasedStateMachine):
    """Each example in a transaction of its own, thrown away at its end. The first among a machine's bases."""

    def __init__(self) -> None:
        self.transaction = transaction.atomic()
        self.transaction.__enter__()
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            transaction.set_rollback(True)
            self.transaction.__exit__(None, None, None)
