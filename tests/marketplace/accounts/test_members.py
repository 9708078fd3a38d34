"""Who belongs to an organisation, and who may change that."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.core.mail import EmailMessage
from django.db.models import Model
from django.test import Client

from marketplace.accounts import members
from marketplace.accounts.access import Actor
from marketplace.accounts.models import AuditEvent, Membership, Role, User
from marketplace.core.clock import database_now
from marketplace.core.errors import Conflict, Forbidden, Gone, InvalidInput, NotFound
from marketplace.core.ids import hash_secret

pytestmark = pytest.mark.django_db


@pytest.fixture
def grace(db: None) -> User:
    return User.objects.create_user("grace@example.org", "correct horse battery")


def join(owner: Actor, user: User, role: str) -> Actor:
    sent = members.invite(owner, email=user.email, role=role, now=database_now())
    return Actor.of_membership(members.accept(user, sent.secret, now=database_now()))


def id_of(actor: Actor) -> int:
    user_id = int(actor.name.removeprefix("user:"))
    return Membership.objects.get(organisation=actor.organisation, user_id=user_id).pk


def test_an_invited_person_joins_in_the_role_they_were_offered(owner: Actor, grace: User) -> None:
    joined = join(owner, grace, Role.VIEWER)
    assert joined.organisation == owner.organisation
    assert joined.role == Role.VIEWER
    actions = AuditEvent.objects.filter(organisation=owner.organisation).values_list("action", flat=True)
    assert {"member.invited", "member.joined"} <= set(actions)


def test_an_invitation_is_stored_as_a_hash_and_works_once(owner: Actor, grace: User) -> None:
    sent = members.invite(owner, email=" Grace@Example.org", role=Role.MEMBER, now=database_now())
    assert sent.invitation.secret_hash == hash_secret(sent.secret)
    members.accept(grace, sent.secret, now=database_now())
    with pytest.raises(Gone):
        members.accept(grace, sent.secret, now=database_now())


def test_nobody_else_can_use_an_invitation(owner: Actor, grace: User) -> None:
    sent = members.invite(owner, email="alan@example.org", role=Role.MEMBER, now=database_now())
    with pytest.raises(Forbidden, match=r"alan@example\.org"):
        members.accept(grace, sent.secret, now=database_now())
    assert not grace.memberships.exists()


def test_an_old_a_withdrawn_and_a_replaced_invitation_open_nothing(owner: Actor, grace: User) -> None:
    now = database_now()
    replaced = members.invite(owner, email=grace.email, role=Role.MEMBER, now=now)
    withdrawn = members.invite(owner, email=grace.email, role=Role.MEMBER, now=now)
    with pytest.raises(Gone):
        members.accept(grace, replaced.secret, now=now)
    members.withdraw(owner, withdrawn.invitation.id, now=now)
    members.withdraw(owner, withdrawn.invitation.id, now=now)
    old = members.invite(owner, email=grace.email, role=Role.MEMBER, now=now)
    with pytest.raises(Gone):
        members.accept(grace, withdrawn.secret, now=now)
    with pytest.raises(Gone):
        members.accept(grace, old.secret, now=now + timedelta(days=8))
    with pytest.raises(NotFound):
        members.accept(grace, "inv_never_sent", now=now)


def test_bad_input_names_its_field(owner: Actor) -> None:
    with pytest.raises(InvalidInput) as address:
        members.invite(owner, email="nobody", role=Role.MEMBER, now=database_now())
    assert [each.field for each in address.value.fields] == ["email"]
    with pytest.raises(InvalidInput) as role:
        members.invite(owner, email="a@example.org", role="king", now=database_now())
    assert [each.field for each in role.value.fields] == ["role"]


def test_an_admin_makes_nobody_an_owner_and_removes_none(owner: Actor, grace: User) -> None:
    admin = join(owner, grace, Role.ADMIN)
    with pytest.raises(Forbidden):
        members.invite(admin, email="x@example.org", role=Role.OWNER, now=database_now())
    with pytest.raises(Forbidden):
        members.change_role(admin, id_of(owner), role=Role.VIEWER)
    with pytest.raises(Forbidden):
        members.remove(admin, id_of(owner))


def test_the_last_owner_can_neither_leave_nor_step_down(owner: Actor, grace: User) -> None:
    for change in (lambda: members.remove(owner, id_of(owner)), lambda: _demote(owner)):
        with pytest.raises(Conflict) as refusal:
            change()
        assert refusal.value.code == "last_owner"
    second = join(owner, grace, Role.OWNER)
    members.remove(owner, id_of(owner))
    assert [m.user_id for m in Membership.objects.filter(organisation=second.organisation)] == [grace.pk]


def _demote(owner: Actor) -> None:
    members.change_role(owner, id_of(owner), role=Role.ADMIN)


def test_a_member_may_leave_and_may_not_remove_others(owner: Actor, grace: User) -> None:
    member = join(owner, grace, Role.MEMBER)
    with pytest.raises(Forbidden):
        members.remove(member, id_of(owner))
    members.remove(member, id_of(member))
    assert not grace.memberships.exists()


def test_members_of_another_organisation_are_not_found(owner: Actor, grace: User) -> None:
    stranger = User.objects.create_user("eve@example.org", "correct horse battery")
    from marketplace.accounts.services import create_organisation

    create_organisation(stranger, name="Elsewhere")
    elsewhere: Model = stranger.memberships.get()
    with pytest.raises(NotFound):
        members.change_role(owner, elsewhere.pk, role=Role.VIEWER)
    with pytest.raises(NotFound):
        members.remove(owner, elsewhere.pk)
    sent = members.invite(
        Actor.of_membership(stranger.memberships.get()), email=grace.email, role="member", now=database_now()
    )
    with pytest.raises(NotFound):
        members.withdraw(owner, sent.invitation.id, now=database_now())


def test_the_page_invites_by_mail_and_the_link_joins(
    signed_in: Client, owner: Actor, grace: User, mailoutbox: list[EmailMessage]
) -> None:
    page = signed_in.post("/organisation/invitations", {"email": grace.email, "role": "member"})
    assert page.status_code == 201
    (mail,) = mailoutbox
    assert mail.to == [grace.email]
    link = re.search(r"http://testserver(/invitations/\S+)", str(mail.body))
    assert link is not None
    assert link.group(1) in page.content.decode()

    hers = Client()
    hers.force_login(grace)
    assert owner.organisation.name in hers.get(link.group(1)).content.decode()
    assert hers.post(link.group(1)).status_code == 302
    assert hers.get("/organisation/").context["organisation"] == owner.organisation
    assert "a week old" in hers.get(link.group(1), follow=True).content.decode()


def test_a_refused_invitation_keeps_what_was_typed_beside_what_is_wrong(signed_in: Client) -> None:
    page = signed_in.post("/organisation/invitations", {"email": "nobody", "role": "viewer"})
    assert page.status_code == 422
    assert "this is not an e-mail address" in page.content.decode()
    assert 'value="nobody"' in page.content.decode()


def test_the_page_changes_roles_removes_and_withdraws(signed_in: Client, owner: Actor, grace: User) -> None:
    joined = join(owner, grace, Role.VIEWER)
    signed_in.post(f"/organisation/members/{id_of(joined)}/role", {"role": "admin"})
    assert Membership.objects.get(pk=id_of(joined)).role == Role.ADMIN
    signed_in.post(f"/organisation/members/{id_of(joined)}/remove")
    assert not grace.memberships.exists()
    sent = members.invite(owner, email="alan@example.org", role="member", now=database_now())
    signed_in.post(f"/organisation/invitations/{sent.invitation.id}/withdraw")
    assert "alan@example.org" not in signed_in.get("/organisation/").content.decode()
    refused = signed_in.post(f"/organisation/members/{id_of(owner)}/remove", follow=True)
    assert "keeps an owner" in refused.content.decode()
