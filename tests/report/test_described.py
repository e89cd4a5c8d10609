"""Charts in words: what a reader hears who cannot see them."""

from typing import Any

from dsim.report.chart import Chart
from dsim.report.html import described
from dsim.report.page import Figure


def said(chart: Chart, **more: Any) -> str:
    return described(Figure("f", "Queue", "", chart, **more))


def test_few_values_are_all_said_with_their_places() -> None:
    chart = Chart("time (s)", "requests")
    chart.line([0, 1.5, 2], [3, float("nan"), 40], "optimus")
    assert said(chart) == "Chart: Queue (requests over time (s)). optimus: 3.00 at 0, 40.0 at 2.00."


def test_of_many_values_the_range_is_said() -> None:
    chart = Chart("", "requests")
    chart.line(list(range(1, 101)), [float(k) for k in range(100)], "<b>chunk</b>")
    assert said(chart) == "Chart: Queue (requests). chunk: 0 to 99.0."


def test_bars_that_lie_are_read_along_their_names() -> None:
    chart = Chart("USD an hour", "")
    chart.add("bar", orientation="h", x=[8.0, 12.0], y=["optimus", "focus"])
    assert said(chart) == "Chart: Queue (USD an hour). 8.00 at optimus, 12.0 at focus."
    dots = Chart("gain", "")
    dots.add("scatter", x=[0.2], y=["optimus"])
    assert said(dots) == "Chart: Queue (gain). 0.200 at optimus."
