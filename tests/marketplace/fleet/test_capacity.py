"""Sites and islands as their seller states them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.accounts.models import AuditEvent, Role
from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorised
from marketplace.fleet import hooks, selectors, services
from marketplace.fleet.models import FleetEvent, IslandState, JoinToken
from marketplace.fleet.terms import to_price_step
from tests.marketplace.fleet.build import NOW, beat, enrol_request, enrolled, h100, island, seller

pytestmark = pytest.mark.django_db


def test_a_registered_island_waits_for_its_agent_with_audit_and_event() -> None:
    actor = seller()
    made = island(actor, wan_up_mbps=500)
    assert (made.state, made.epoch, made.wan_down_mbps) == (IslandState.REGISTERED, 0, None)
    assert list(AuditEvent.objects.order_by("id").values_list("action", flat=True))[-2:] == [
        "site.registered",
        "island.registered",
    ]
    assert [event.kind for event in selectors.events_of(made)] == ["registered"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "  "}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"gpu": "h1000"}, "gpu"),
        ({"gpu_count": 0}, "gpu_count"),
        ({"gpu_count": 12, "gpus_per_lot": 8}, "gpus_per_lot"),
        ({"price_uusd_per_gpu_hour": 2_150_000}, "price_uusd_per_gpu_hour"),
        ({"price_uusd_per_gpu_hour": 0}, "price_uusd_per_gpu_hour"),
        ({"price_uusd_per_gpu_hour": 10**12}, "price_uusd_per_gpu_hour"),
        ({"available_until": NOW}, "available_until"),
        ({"min_lease_min": 0}, "min_lease_min"),
        ({"wan_up_mbps": 0}, "wan_up_mbps"),
        ({"preempt_notice_s": 30}, "preempt_notice_s"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        island(seller(), **change)
    assert [problem.field for problem in caught.value.fields] == [field]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        island(seller(), name="", gpu="nothing", gpu_count=0)
    assert [problem.field for problem in caught.value.fields] == ["name", "gpu_count", "gpu"]


def test_a_price_that_cannot_be_paid_by_the_minute_is_told_the_nearest_that_can() -> None:
    with pytest.raises(InvalidInput, match="the nearest is 2150040"):
        island(seller(), price_uusd_per_gpu_hour=2_150_020)


@given(price=st.integers(1, 10**9))
def test_the_nearest_price_is_a_multiple_of_sixty_and_at_most_half_a_step_away(price: int) -> None:
    near = to_price_step(price)
    assert near % 60 == 0
    assert near > 0
    assert abs(near - price) <= 30 or near == 60


def test_two_islands_of_one_name_at_one_site_are_refused() -> None:
    actor = seller()
    site = services.register_site(actor, name="Leipzig", country="de", now=NOW)
    assert site.country == "DE"
    island(actor, site=site)
    with pytest.raises(Conflict) as caught:
        island(actor, site=site)
    assert (caught.value.code, caught.value.fields[0].field) == ("name_taken", "name")
    with pytest.raises(Conflict):
        services.register_site(actor, name=" Leipzig ", now=NOW)
    with pytest.raises(InvalidInput):
        services.register_site(actor, name="x", country="Germany", now=NOW)


def test_another_organisations_site_and_island_look_like_none() -> None:
    mine, theirs = seller(), seller()
    their_site = services.register_site(theirs, name="theirs", now=NOW)
    with pytest.raises(InvalidInput) as caught:
        island(mine, site=their_site)
    assert caught.value.fields[0].field == "site_id"
    their_island = island(theirs, site=their_site)
    for act in (
        lambda: services.change_island(mine, their_island.id, listed=False, now=NOW),
        lambda: services.issue_join_token(mine, their_island.id, NOW),
        lambda: services.revoke_agent(mine, their_island.id, NOW),
        lambda: services.rotate_agent(mine, their_island.id, NOW),
        lambda: services.retire_island(mine, their_island.id, now=NOW),
        lambda: selectors.island_for(mine.organisation, their_island.id),
    ):
        with pytest.raises(NotFound):
            act()


def test_a_viewer_changes_nothing() -> None:
    viewer = seller(role=Role.VIEWER)
    with pytest.raises(Forbidden):
        services.register_site(viewer, name="x", now=NOW)


def test_a_new_price_is_for_leases_to_come_and_is_told() -> None:
    actor = seller()
    made = island(actor)
    changed = services.change_island(actor, made.id, price_uusd_per_gpu_hour=1_800_000, wan_up_mbps=None, now=NOW)
    assert changed.price_uusd_per_gpu_hour == 1_800_000
    event = selectors.events_of(made)[0]
    assert (event.kind, event.message) == ("repriced", "asks $1.800 per GPU-hour for new leases")
    assert event.detail["changes"] == {"price_uusd_per_gpu_hour": [2_400_000, 1_800_000]}


def test_the_same_terms_again_leave_no_trace() -> None:
    actor = seller()
    made = island(actor)
    services.change_island(actor, made.id, price_uusd_per_gpu_hour=2_400_000, listed=True, now=NOW)
    assert FleetEvent.objects.filter(island=made).count() == 1


def test_an_end_of_the_window_can_be_stated_and_taken_back() -> None:
    actor = seller()
    made = island(actor)
    until = NOW + timedelta(days=2)
    assert services.change_island(actor, made.id, available_until=until, now=NOW).available_until == until
    assert services.change_island(actor, made.id, available_until=None, now=NOW).available_until is None
    with pytest.raises(InvalidInput):
        services.change_island(actor, made.id, available_until=NOW - timedelta(days=1), now=NOW)


def test_a_retired_island_takes_no_agent_no_terms_and_its_agent_is_out() -> None:
    actor = seller()
    made = island(actor)
    reply = enrolled(actor, made)
    unused = services.issue_join_token(actor, made.id, NOW)
    services.retire_island(actor, made.id, now=NOW)
    again = services.retire_island(actor, made.id, now=NOW)
    assert (again.state, again.listed) == (IslandState.RETIRED, False)
    with pytest.raises(Unauthorised) as caught:
        services.sync(reply.credential, beat(), NOW)
    assert caught.value.code == "revoked"
    with pytest.raises(Unauthorised):
        services.enrol(enrol_request(unused.secret), NOW)
    for act in (
        lambda: services.issue_join_token(actor, made.id, NOW),
        lambda: services.change_island(actor, made.id, listed=True, now=NOW),
    ):
        with pytest.raises(Conflict):
            act()
    assert AuditEvent.objects.filter(action="island.retired").count() == 1
    assert JoinToken.objects.filter(revoked_at__isnull=False).count() == 1


def test_an_island_somebody_holds_is_not_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = seller()
    made = island(actor)
    monkeypatch.setattr(hooks, "_holders", [lambda held, now: ["lease lse_1"]])
    with pytest.raises(Conflict, match="lease lse_1") as caught:
        services.retire_island(actor, made.id, now=NOW)
    assert caught.value.code == "island_in_use"
    made.refresh_from_db()
    assert made.state == IslandState.REGISTERED


def test_islands_and_their_agents_are_read_without_a_query_each(django_assert_num_queries: Any) -> None:
    actor = seller()
    h100()
    for number in range(3):
        made = island(actor, name=f"island {number}")
        enrolled(actor, made)
    with django_assert_num_queries(2):
        found = list(selectors.islands_of(actor.organisation))
        agents = selectors.current_agents(found)
        assert {agents[each.id].epoch for each in found} == {1}
        assert all(each.site.name and each.gpu.name for each in found)
