"""What the pictures of a long run are made of: bounded, even, and never without the last round."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest

from marketplace.training.models import Job, Round, RoundState
from marketplace.training.selectors import thinned
from tests.marketplace.training.crew import START, make_job

pytestmark = pytest.mark.django_db


def run_of(rounds: int) -> Job:
    job = make_job()
    Round.objects.bulk_create(
        Round(
            job=job,
            number=number,
            state=RoundState.SEALED,
            opened_at=START,
            deadline_at=START + timedelta(minutes=1),
            sealed_at=START,
            tokens_before=number,
            manifest={},
        )
        for number in range(rounds)
    )
    Job.objects.filter(pk=job.pk).update(rounds_sealed=rounds)
    return job


@pytest.mark.parametrize("rounds", [1, 2, 9, 10, 19, 20, 21, 1_003])
def test_a_picture_has_the_first_and_last_round_and_never_twice_what_is_asked(rounds: int) -> None:
    run_of(rounds)
    numbers = list(thinned(Round.objects.order_by("number"), 10).values_list("number", flat=True))
    assert numbers[0] == 0
    assert numbers[-1] == rounds - 1
    assert len(numbers) <= min(rounds, 21)
    steps = {two - one for one, two in pairwise(numbers[:-1])}
    assert len(steps) <= 1


def test_a_short_run_is_shown_whole_beside_a_long_one() -> None:
    long, short = run_of(500), run_of(5)
    shown = thinned(Round.objects.all(), 10)
    assert shown.filter(job=short).count() == 5
    assert shown.filter(job=long).count() <= 21
