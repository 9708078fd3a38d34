"""What changes jobs and their runs: the domain's one door for the layers above and for the views."""

from __future__ import annotations

from marketplace.training.services.membership import drain_member, member_gone, member_token, place_member

__all__ = ["drain_member", "member_gone", "member_token", "place_member"]
