"""Charts in words: what a reader hears who cannot see them."""

from typing import Any

from dsim.report.chart import Chart
from dsim.report.html import described
from dsim.report.page import Figure


def said(chart: Chart, **more: Any) -> str:
    return described(Figure("f", "Queue", "", chart, **more))


def test_each_trace_says_its_range() -> None:
    chart = Chart("time (s)", "requests")
    chart.line([0, 1.5, 2], [3, float("nan"), 40], "<b>optimus</b>")
    chart.line([0], [float("nan")], "nothing")
    assert said(chart) == "Chart: Queue (requests over time (s)). optimus: 3.00 to 40.0."


def test_bars_that_lie_are_read_along_their_length() -> None:
    chart = Chart("USD an hour", "")
    chart.add("bar", orientation="h", x=[8.0, 12.0], y=["optimus", "focus"])
    assert said(chart) == "Chart: Queue (USD an hour). 8.00 to 12.0."
    dots = Chart("gain", "")
    dots.add("scatter", x=[0.2], y=["optimus"])
    assert said(dots) == "Chart: Queue (gain). 0.200 to 0.200."
