from __future__ import annotations

from marketplace.trading.chart import HEADROOM, HEIGHT, WIDTH, window_chart
from marketplace.trading.positions import Step


def test_a_lease_given_back_at_half_time_is_drawn_full_and_then_empty() -> None:
    chart = window_chart([Step(0, 60, 4), Step(60, 100, 4)], [], [Step(50, 100, 4)], 0, 100, 25)
    assert chart.area == f"M0 {HEIGHT}L0 {HEADROOM}L500 {HEADROOM}L500 {HEIGHT}L{WIDTH} {HEIGHT}L{WIDTH} {HEIGHT}Z"
    assert chart.given_back == f"M500 {HEADROOM}H{WIDTH}V{HEIGHT}H500Z"
    assert (chart.now_x, chart.most) == (250, 4)
    assert chart.summary == "4 GPUs for 50 minutes; 0 GPUs for 50 minutes"


def test_a_moment_outside_the_window_is_not_marked() -> None:
    assert window_chart([Step(10, 20, 1)], [], [], 10, 20, 21).now_x is None
    assert window_chart([Step(10, 20, 1)], [], [], 10, 20, 9).now_x is None


def test_what_was_sold_on_lies_on_top_of_what_is_still_held() -> None:
    chart = window_chart([Step(0, 100, 4)], [Step(50, 75, 3)], [], 0, 100, None)
    assert chart.sold_on == "M500 8H750V77H500Z"
    assert chart.given_back == ""
    assert chart.summary == "4 GPUs for 50 minutes; 1 GPUs for 25 minutes; 4 GPUs for 25 minutes"
