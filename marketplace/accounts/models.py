"""Who acts: users, organisations, memberships, API keys, and the audit trail.

Invariant: everything that is owned is owned by an organisation; a user acts through a membership, a program through a
key. Secrets are stored as SHA-256 only. The audit trail is append-only.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth.models import AbstractUser, BaseUserManager
from django.db import models
from django.db.models import Q

from marketplace.core.ids import LENGTH, new_id


def organisation_id() -> str:
    return new_id("org")


def api_key_id() -> str:
    return new_id("key")


def invitation_id() -> str:
    return new_id("inv")


class UserManager(BaseUserManager["User"]):
    """Users are known by their e-mail address."""

    def create_user(self, email: str, password: str | None = None, **extra: Any) -> User:
        user = self.model(email=self.normalize_email(email), **extra)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **extra: Any) -> User:
        return self.create_user(email, password, is_staff=True, is_superuser=True, **extra)


class User(AbstractUser):
    username = None  # type: ignore[assignment]  # removed on purpose: the e-mail address is the name
    email = models.EmailField("e-mail address", unique=True)

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects = UserManager()  # type: ignore[misc, assignment]  # narrower than AbstractUser's, for the same reason


class Organisation(models.Model):
    id = models.CharField(primary_key=True, max_length=LENGTH, default=organisation_id, editable=False)
    name = models.CharField(max_length=120)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


class Role(models.TextChoices):
    """From most to least; each may do what those below may."""

    OWNER = "owner", "Owner"
    ADMIN = "admin", "Admin"
    MEMBER = "member", "Member"
    VIEWER = "viewer", "Viewer"


class Membership(models.Model):
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    organisation = models.ForeignKey(Organisation, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["user", "organisation"], name="one_membership")]

    def __str__(self) -> str:
        return f"{self.user} in {self.organisation} as {self.role}"


class Invitation(models.Model):
    """Asks the owner of one address to join, once, within the week."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=invitation_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.CASCADE, related_name="invitations")
    email = models.EmailField()
    role = models.CharField(max_length=10, choices=Role.choices)
    secret_hash = models.CharField(max_length=64, unique=True)
    invited_by = models.CharField(max_length=200)  # the actor's name
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["organisation", "email"],
                condition=Q(accepted_at=None, revoked_at=None),
                name="one_open_invitation_an_address",
            )
        ]

    def __str__(self) -> str:
        return f"{self.email} to {self.organisation_id} as {self.role}"


class ApiKey(models.Model):
    """A program's key: shown once, stored as a hash, revocable, with the role it acts in."""

    id = models.CharField(primary_key=True, max_length=LENGTH, default=api_key_id, editable=False)
    organisation = models.ForeignKey(Organisation, on_delete=models.CASCADE, related_name="api_keys")
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL)
    name = models.CharField(max_length=120)
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)
    secret_hash = models.CharField(max_length=64, unique=True)
    hint = models.CharField(max_length=12)  # the first characters, so that a person recognises it
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.hint})"


class IdempotencyRecord(models.Model):
    """The answer to a write that carried an Idempotency-Key; inserted in the write's own transaction."""

    organisation = models.ForeignKey(Organisation, on_delete=models.CASCADE)
    key = models.CharField(max_length=200)
    route = models.CharField(max_length=200)
    body_hash = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    response = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["organisation", "key", "route"], name="one_answer_per_idempotency_key")
        ]

    def __str__(self) -> str:
        return f"{self.route} {self.key}"


class AuditEvent(models.Model):
    """Who did what to which object; written in the transaction of the change, never changed (trigger)."""

    organisation = models.ForeignKey(Organisation, null=True, on_delete=models.PROTECT)
    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=200)  # "user:<id>", "key:<id>", "agent:<id>", "system:<what>"
    action = models.CharField(max_length=80)
    object_id = models.CharField(max_length=80)
    detail = models.JSONField(default=dict)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["organisation", "-at"], name="audit_by_organisation")]

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.object_id}"
