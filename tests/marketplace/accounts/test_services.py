from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from django.db import IntegrityError, transaction

from marketplace.accounts import services
from marketplace.accounts.access import Action, Actor, may
from marketplace.accounts.audit import record
from marketplace.accounts.models import ApiKey, AuditEvent, Organisation, Role, User
from marketplace.accounts.selectors import live_key
from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def test_the_first_user_of_an_organisation_owns_it(owner: Actor) -> None:
    assert owner.role == Role.OWNER
    assert AuditEvent.objects.get(action="organisation.created").actor == owner.name


def test_beginning_an_organisation_twice_begins_one(ada: User) -> None:
    assert services.ensure_organisation(ada) == services.ensure_organisation(ada)
    assert Organisation.objects.count() == 1


def test_of_a_secret_only_the_hash_is_kept(owner: Actor) -> None:
    issued = services.issue_key(owner, name="ci", now=NOW)
    stored = ApiKey.objects.filter(pk=issued.key.pk).values().get()
    assert issued.secret not in str(stored)
    assert issued.secret not in str(list(AuditEvent.objects.values()))
    assert live_key(issued.secret, NOW) == issued.key


def test_a_key_ends_by_itself(owner: Actor) -> None:
    issued = services.issue_key(owner, name="ci", now=NOW, expires_in_days=7)
    assert live_key(issued.secret, NOW + timedelta(days=7) - timedelta(seconds=1)) is not None
    assert live_key(issued.secret, NOW + timedelta(days=7)) is None


def test_revoking_twice_is_revoking_once(owner: Actor) -> None:
    issued = services.issue_key(owner, name="ci", now=NOW)
    services.revoke_key(owner, issued.key.id, now=NOW)
    services.revoke_key(owner, issued.key.id, now=NOW + timedelta(hours=1))
    assert live_key(issued.secret, NOW) is None
    assert ApiKey.objects.get().revoked_at == NOW
    assert AuditEvent.objects.filter(action="api_key.revoked").count() == 1


def test_another_organisations_key_is_not_found(owner: Actor) -> None:
    other = User.objects.create_user("eve@example.org")
    services.ensure_organisation(other)
    issued = services.issue_key(owner, name="ci", now=NOW)
    with pytest.raises(NotFound):
        services.revoke_key(Actor.of_membership(other.memberships.get()), issued.key.id, now=NOW)
    assert live_key(issued.secret, NOW) is not None


def test_nobody_gives_away_a_role_above_their_own(owner: Actor) -> None:
    admin = Actor(owner.organisation, Role.ADMIN, "user:9")
    with pytest.raises(Forbidden):
        services.issue_key(admin, name="ci", now=NOW, role=Role.OWNER)


@pytest.mark.parametrize("role", [Role.MEMBER, Role.VIEWER])
def test_a_member_issues_no_keys(owner: Actor, role: str) -> None:
    with pytest.raises(Forbidden):
        services.issue_key(Actor(owner.organisation, role, "user:9"), name="ci", now=NOW, role=Role.VIEWER)


@pytest.mark.parametrize(("field", "wrong"), [("name", " "), ("expires_in_days", 0), ("role", "king")])
def test_a_wrong_field_is_named(owner: Actor, field: str, wrong: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        services.issue_key(owner, now=NOW, **{"name": "ci", field: wrong})  # type: ignore[arg-type]
    assert [each.field for each in caught.value.fields] == [field]


def test_there_is_an_end_to_live_keys(owner: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "LIVE_KEYS_MAX", 1)
    services.issue_key(owner, name="one", now=NOW)
    with pytest.raises(Conflict):
        services.issue_key(owner, name="two", now=NOW)


@pytest.mark.parametrize("sql", ["UPDATE accounts_auditevent SET actor = 'x'", "DELETE FROM accounts_auditevent"])
def test_the_database_refuses_to_change_the_audit_trail(owner: Actor, sql: str) -> None:
    from django.db import connection

    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)


@pytest.mark.django_db(transaction=True)
def test_an_audit_event_outside_a_transaction_is_refused() -> None:
    with pytest.raises(RuntimeError):
        record(None, "system:test", "nothing", "none")


def test_a_role_may_do_what_lesser_roles_may() -> None:
    class Holder:
        def __init__(self, role: str) -> None:
            self.role = role

    allowed = [{action for action in Action if may(Holder(role), action)} for role in Role]
    assert all(more >= less for more, less in pairwise(allowed))
    assert not any(may(None, action) for action in Action)
