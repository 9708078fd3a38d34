"""Silence: when an island is suspect, when it is lost, and who is woken."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pytest_django import Settings

from marketplace.fleet import services
from marketplace.fleet.liveness import judge, lost_after_ms, suspect_after_ms
from marketplace.fleet.models import FleetEvent, Island, IslandState
from tests.marketplace.fleet.build import NOW, beat, enrolled, island, seller

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("state", "silent_ms", "becomes"),
    [
        ("online", 14_999, None),
        ("online", 15_000, IslandState.SUSPECT),
        ("suspect", 44_999, None),
        ("suspect", 45_000, IslandState.LOST),
        ("draining", 44_999, None),
        ("draining", 45_000, IslandState.LOST),
        ("registered", 10**9, None),
        ("lost", 10**9, None),
        ("retired", 10**9, None),
    ],
)
def test_three_missed_intervals_are_suspect_and_nine_are_lost(
    state: str, silent_ms: int, becomes: IslandState | None
) -> None:
    assert judge(state, silent_ms, 5_000) == becomes


@pytest.mark.parametrize(
    ("state", "silent_ms", "becomes"),
    [
        ("online", 15_000, IslandState.SUSPECT),
        ("suspect", 179_999, None),
        ("suspect", 180_000, IslandState.LOST),
        ("draining", 45_000, IslandState.LOST),
    ],
)
def test_where_all_are_silent_nobody_is_lost_so_soon(state: str, silent_ms: int, becomes: IslandState | None) -> None:
    assert judge(state, silent_ms, 5_000, all_silent=True) == becomes


def test_both_limits_follow_the_interval() -> None:
    assert (suspect_after_ms(200), lost_after_ms(200)) == (600, 1_800)


def after(seconds: float) -> list[str]:
    return services.sweep_liveness(NOW + timedelta(seconds=seconds))


def state_of(island: Island) -> str:
    island.refresh_from_db()
    return island.state


def hear(credential: str, *seconds: float) -> None:
    """Its beats, that many seconds from NOW; each call needs later ones than the last."""
    for each in seconds:
        services.sync(credential, beat(int(each * 10) + 1), NOW + timedelta(seconds=each))


def test_after_an_outage_of_ours_everyone_has_the_time_to_come_back(settings: Settings) -> None:
    settings.FLEET_SYNC_MS = 5_000
    actor = seller()
    made = [island(actor, name=name) for name in ("tartu", "porto")]
    first, second = (enrolled(actor, each).credential for each in made)
    hear(first, 0)
    hear(second, 1)
    assert sorted(after(100)) == sorted(each.id for each in made)
    assert after(101) == []  # suspect, and no more: nobody is heard
    hear(first, 102, 107, 112, 117, 122, 127, 132, 137, 142, 147)
    assert after(146) == []
    assert after(148) == [made[1].id]
    assert state_of(made[1]) == IslandState.LOST


def test_a_lone_island_is_lost_in_the_end(settings: Settings) -> None:
    settings.FLEET_SYNC_MS = 5_000
    actor = seller()
    made = island(actor)
    hear(enrolled(actor, made).credential, 0)
    assert after(16) == [made.id]
    assert after(179) == []
    assert after(180) == [made.id]
    assert Island.objects.get().state == IslandState.LOST


def test_a_silent_island_is_suspect_then_lost_and_a_beat_heals_it(settings: Settings) -> None:
    settings.FLEET_SYNC_MS = 5_000
    actor = seller()
    made = island(actor)
    credential = enrolled(actor, made).credential
    assert after(3_600) == []  # never heard from: it waits
    services.sync(credential, beat(1), NOW)
    hear(enrolled(actor, island(actor, name="another")).credential, 0, 10, 20, 30, 40, 50)
    assert after(14) == []
    assert after(16) == [made.id]
    assert after(17) == []
    assert state_of(made) == IslandState.SUSPECT
    assert after(46) == [made.id]
    assert state_of(made) == IslandState.LOST
    assert after(60) == []
    later = NOW + timedelta(seconds=1_000)
    assert services.sync(credential, beat(2), later).island_state == "online"
    kinds = list(FleetEvent.objects.order_by("id").values_list("kind", flat=True))
    assert kinds[-4:] == ["online", "suspect", "lost", "online"]
    lost = FleetEvent.objects.get(kind="lost")
    assert lost.message == "no beat of its agent for 46 s"


def test_an_island_enrolled_anew_is_judged_by_its_new_agent_alone(settings: Settings) -> None:
    settings.FLEET_SYNC_MS = 5_000
    actor = seller()
    made = island(actor)
    services.sync(enrolled(actor, made).credential, beat(1), NOW)
    enrolled(actor, made, now=NOW + timedelta(seconds=14))
    assert after(20) == []
    assert after(30) == [made.id]


def test_an_agent_that_left_in_order_is_lost_in_the_end_and_never_suspect() -> None:
    actor = seller()
    made = island(actor)
    credential = enrolled(actor, made).credential
    services.sync(credential, beat(1, draining=True), NOW)
    assert after(20) == []
    assert after(50) == [made.id]
    assert Island.objects.get().state == IslandState.LOST
    assert FleetEvent.objects.get(kind="lost").message == "its agent has stopped, as it was asked to"


def test_a_change_of_state_wakes_the_scheduler_after_commit(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks
) -> None:
    actor = seller()
    credential = enrolled(actor, island(actor)).credential
    settings.WAKE_UPS = True
    with django_capture_on_commit_callbacks() as callbacks:
        services.sync(credential, beat(1), NOW)
    assert len(callbacks) == 1
    with django_capture_on_commit_callbacks() as callbacks:
        services.sync(credential, beat(2), NOW)
    assert callbacks == []
