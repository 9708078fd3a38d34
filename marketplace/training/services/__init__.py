"""What changes jobs and their runs: the domain's one door for the layers above and for the views."""

from __future__ import annotations

from marketplace.training.services.blobs import sweep_blobs
from marketplace.training.services.jobs import advance_jobs, cancel_job, note_wait, submit_job
from marketplace.training.services.membership import drain_member, member_gone, member_token, place_member
from marketplace.training.services.rounds import sweep_rounds
from marketplace.training.services.serving import sweep_members

__all__ = [
    "advance_jobs",
    "cancel_job",
    "drain_member",
    "member_gone",
    "member_token",
    "note_wait",
    "place_member",
    "submit_job",
    "sweep_blobs",
    "sweep_members",
    "sweep_rounds",
]
