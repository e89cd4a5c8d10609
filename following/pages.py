"""The page of a followed server: now, headroom, whether the twin is right, what changed, one recommendation."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .. import __version__
from ..report.chart import Chart
from ..report.page import Figure, Number, Page, Section, Table, Words, numbers, table
from ..report.table import number
from .follower import DAY, Follower
from .residuals import CAUSE_OF, DISTRIBUTIONS

QUESTION = "Is the server as its twin says, and how much more does it take?"
QUANTITIES = {name: name for name in ("ttft", "e2el")} | {
    "rate": "requests a second",
    "input_length": "prompt's length",
    "output_length": "answer's length",
    "step_time": "time of a step",
    "steps_per_token": "steps a token",
    "running": "requests running",
    "waiting": "requests waiting",
    "queue": "time in the queue",
}
BAND = 2.0  # standard deviations drawn as the usual range
POINTS = "lines+markers"  # one window has no line
Record = Mapping[str, Any]


def page_of(follower: Follower, command: str = "") -> Page:
    """The page of the newest window."""
    if not follower.windows:
        return Page(
            "dsim follow", QUESTION, _waiting(follower), facts=_facts(follower), command=command, version=__version__
        )
    last = follower.windows[-1]
    windows = [window for window in follower.windows if window["end"] > last["end"] - DAY]
    state = "No alarm is open."
    if last["alarms"]:
        state = f"The server has drifted from its twin: {', '.join(last['alarms'])}."
    answer, sections = state, [Section("Is the twin right?", (_residuals(last),))]
    if "advice" in last:
        reason = last["advice"]["reason"]
        answer = f"{last['advice']['action']} {reason[:1].upper()}{reason[1:]}. {state}"
        sections.append(Section("What if", (_what_if(last),)))
    cautions = []
    if last["extrapolating"]:
        cautions.append(("Extrapolating.", "The steps of now lie beyond those that the profile was fitted to."))
    window = f"{moment(last['begin'])} to {moment(last['end'])[-5:]} UTC"
    return Page(
        name="dsim follow",
        question=QUESTION,
        answer=answer,
        alarms=tuple(f"DRIFT {alarm['words']}" for alarm in last["alarms"].values()),
        cautions=tuple(cautions),
        numbers=_numbers(follower, last),
        chart=_predicted(windows),
        facts=(*_facts(follower), ("Window", window)),
        sections=(*sections, _changes(windows)),
        command=command,
        version=__version__,
    )


def _waiting(follower: Follower) -> str:
    progress = "none"
    if follower.open_window is not None:
        progress = f"{follower.open_window.duration:.0f} s and {follower.open_window.num_arrivals} requests"
    first = "the first serves as the run-in of the second"
    return f"No window has been judged yet. The open one holds {progress}; {first}."


def _second(time: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment(time: float) -> str:
    """A time in UTC, to the minute."""
    return _second(time)[:-3]


def _numbers(follower: Follower, last: Record) -> tuple[Number, ...]:
    capacity, rate, gauges = follower.capacity, last["traffic"]["rate"], last["gauges"]
    rows = [("Requests a second", f"{number(rate)} req/s", f"{number(last['requests'])} in the window")]
    if capacity is not None:
        rows.append(("Headroom", f"{number(capacity - rate)} req/s", f"of {number(capacity)} req/s"))
    elif "advice" in last:
        rows.append(("Headroom", "not known", "the twin is not the server"))
    rows.append(("Running", number(gauges["running"]), f"{number(gauges['waiting'])} waiting"))
    for text, (measured, predicted) in last["slos"].items():
        rows.append((text, _span(measured), f"the twin says {_span(predicted)}"))
    return numbers(rows, len(rows))


def _span(share: Sequence[float | None]) -> str:
    """The text of a share between two bounds."""
    low, high = share
    if low is None or high is None:
        return "–"
    if high - low < 5e-4:
        return f"{low:.1%}"
    return f"{low:.1%} to {high:.1%}"


def _facts(follower: Follower) -> tuple[tuple[str, str], ...]:
    followed, profile = follower.followed, follower.world.setting().profile
    return (
        ("Servers", ", ".join(followed.urls)),
        ("Policy", followed.world.policy),
        ("Profile", f"{profile.name}, version {follower.version} ({profile.verdict})"),
        ("SLOs", ", ".join(followed.world.slos) or "none"),
    )


def _predicted(windows: Sequence[Record]) -> Figure:
    chart = Chart(y="measured / predicted", legend=True, from_zero=False)
    begin, end = windows[0]["begin"], windows[-1]["end"]
    chart.x["range"] = [_second(begin), _second(end + (end - begin) / 30)]  # Plotly's own is of ms for a single point
    times = [_second(window["end"]) for window in windows]
    for index, name in enumerate(name for name in DISTRIBUTIONS if name in windows[-1]["measured"]):
        ratios = []
        for window in windows:
            measured, predicted = (window[side].get(name) or math.nan for side in ("measured", "predicted"))
            ratios.append(measured / predicted)
        chart.line(times, ratios, QUANTITIES[name], index, mode=POINTS)
    chart.hline(1.0)
    for window in windows:
        for alarm in window["raised"]:
            chart.vline(_second(alarm["since"]), alarm["cause"])
    caption = "Means of each window, over the last day. 1: as the twin says. A line marks an alarm. UTC."
    return Figure("predicted", "Measured over predicted", caption, chart)


def _residuals(last: Record) -> Table:
    rows = []
    for name, (residual, _) in last["residuals"].items():
        smooth, deviation = last["smooth"].get(name), last["deviations"].get(name)
        if smooth is None or residual is None:
            continue
        shares = [f"{math.expm1(log):+.1%}" for log in (residual, smooth)]
        verdict = "off" if abs(smooth) >= BAND * deviation else "usual"
        rows.append((QUANTITIES[name], CAUSE_OF[name], *shares, f"±{math.expm1(BAND * deviation):.1%}", verdict))
    head = ("quantity", "cause", "this window", "moving average", "usual", "verdict")
    caption = "Measured against predicted; of traffic, against the usual. The usual range is of one window."
    return table(head, rows, caption=caption, left=frozenset({0, 1, 5}))


def _what_if(last: Record) -> Table:
    rows = []
    for outcome in last["what_if"]:
        cells = [outcome["name"], f"{outcome['replicas']}", "–", f"{number(outcome['e2el_p90'])} s"]
        if outcome["attainment"] is not None:
            cells[2] = f"{outcome['attainment']:.1%}"
        rows.append(cells)
    head = ("what if", "replicas", "within the SLOs", "p90 of e2el")
    return table(head, rows, caption="Replays of the last two windows' requests.")


def _changes(windows: Sequence[Record]) -> Section:
    """The alarms of a day, and the profiles that were adopted."""
    lines = []
    for window in windows:
        time = moment(window["end"])
        lines += [f"{time}: alarm, {alarm['words']}" for alarm in window["raised"]]
        if adopted := window.get("adopted"):
            evidence = f"from {adopted['windows']} windows since {moment(adopted['begin'])}"
            change = f"profile version {adopted['version']}, {adopted['words']}"
            lines.append(f"{time}: {change}, {evidence} ({adopted['reason']})")
    return Section("What changed", (Words(tuple(lines) or ("No alarm, no new profile.",)),))


def line_of(record: Record) -> str:
    """One line of text about a window."""
    parts = [f"{record['requests']} requests at {record['traffic']['rate']:.3g} req/s"]
    for name in ("step_time", "steps_per_token", "e2el"):
        if name in record["smooth"]:
            parts.append(f"{name} {math.expm1(record['smooth'][name] or 0.0):+.1%}")
    parts.append(", ".join(record["alarms"]) or "no alarm")
    if "advice" in record:
        parts.append(record["advice"]["action"])
    return "; ".join(parts)
