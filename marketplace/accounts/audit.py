"""The audit trail's one writer.

Invariant: an event is written in the transaction of the change it tells of, so neither exists without the other; the
database refuses to change or delete one (trigger).
"""

from __future__ import annotations

from typing import Any

from django.db import connection

from marketplace.accounts.models import AuditEvent, Organisation


def record(organisation: Organisation | None, actor: str, action: str, object_id: str, **detail: Any) -> AuditEvent:
    """Write one event. `detail` is JSON and never holds a secret."""
    if not connection.in_atomic_block:
        raise RuntimeError("an audit event belongs in the transaction of its change")
    return AuditEvent.objects.create(
        organisation=organisation, actor=actor, action=action, object_id=object_id, detail=detail
    )
