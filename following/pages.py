"""The page of a followed server: now, headroom, whether the twin is right, what changed, one recommendation."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .. import __version__
from ..report.chart import Chart
from ..report.page import Figure, Number, Page, Section, Words, table
from ..report.table import number
from .follower import DAY, Follower
from .residuals import CAUSE_OF, DISTRIBUTIONS

QUESTION = "Is the server as its twin says, and how much more does it take?"
QUANTITIES = {
    "rate": "requests a second", "input_length": "prompt's length", "output_length": "answer's length",
    "step_time": "time of a step", "steps_per_token": "steps a token", "running": "requests running",
    "waiting": "requests waiting", "queue": "time in the queue", "ttft": "ttft", "e2el": "e2el",
}  # fmt: skip
BAND = 2.0  # standard deviations drawn as the usual range
POINTS = "lines+markers"  # one window has no line


def page_of(follower: Follower, command: str = "") -> Page:
    """The page of the newest window."""
    windows = [w for w in follower.windows if w["end"] > (follower.windows[-1]["end"] - DAY)]
    if not windows:
        opened = follower.open_window
        far = "none" if opened is None else f"{opened.duration:.0f} s and {opened.num_arrivals} requests"
        answer = (
            f"No window has been judged yet. The open one holds {far}; the first serves as the run-in of the second."
        )
        return Page(
            "dsim follow", QUESTION, answer, facts=tuple(_facts(follower, {})), command=command, version=__version__
        )
    last = windows[-1]
    advice = last.get("advice", {})
    alarms = tuple(f"DRIFT {alarm['words']}" for alarm in last["alarms"].values())
    cautions = []
    if last.get("unmeasured"):
        words = f"{_sentence(last['unmeasured'])} Prices raise no alarm until windows have measured them."
        cautions.append(("The profile is not valid.", words))
    if last["extrapolating"]:
        cautions.append(("Extrapolating.", "The steps of now lie beyond those that the profile was fitted to."))
    if last["drawn"]:
        cautions.append(
            ("Drawn requests.", "No access log is read: arrivals and lengths follow the server's counters and buckets.")
        )
    return Page(
        name="dsim follow",
        question=QUESTION,
        answer=f"{advice['do']} {_sentence(advice['why'])}" if advice else _state(last),
        details=(_state(last),) if advice else (),
        alarms=alarms,
        cautions=tuple(cautions),
        numbers=tuple(_numbers(follower, last)),
        facts=tuple(_facts(follower, last)),
        sections=tuple(filter(None, (
            _advice(advice),
            Section("Is the twin right?", (_predicted(windows), _residuals(last))),
            _what_if(last), _changes(follower, windows),
        ))),
        command=command,
        version=__version__,
    )  # fmt: skip


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def _state(last: dict[str, Any]) -> str:
    if last["alarms"]:
        return f"The server has drifted from its twin: {', '.join(last['alarms'])}."
    return "No alarm is open."


def moment(time: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _numbers(follower: Follower, last: dict[str, Any]) -> list[Number]:
    capacity, rate = follower.capacity, last["traffic"]["rate"]
    numbers = [
        Number("Requests a second", ((None, f"{number(rate)} req/s"),), f"{number(last['requests'])} in the window")
    ]
    if capacity is not None:
        about = f"of {number(capacity)} req/s"
        numbers.append(Number("Headroom", ((None, f"{number(capacity - rate)} req/s"),), about))
    elif "advice" in last:
        about = "the twin is not the server" if follower.alarms.open else "no SLO is given"
        numbers.append(Number("Headroom", ((None, "not known"),), about))
    gauges = last["gauges"]
    numbers.append(Number("Running", ((None, number(gauges["running"])),), f"{number(gauges['waiting'])} waiting"))
    for text, (measured, predicted) in last["slos"].items():
        numbers.append(Number(text, ((None, _span(measured)),), f"the twin says {_span(predicted)}"))
    return numbers


def _span(share: Sequence[float | None]) -> str:
    """The text of a share between two bounds."""
    low, high = (math.nan if x is None else x for x in share)
    if math.isnan(low):
        return "–"
    return f"{low:.1%}" if high - low < 5e-4 else f"{low:.1%} to {high:.1%}"


def _facts(follower: Follower, last: dict[str, Any]) -> list[tuple[str, str]]:
    followed = follower.followed
    setting = follower.world.setting()
    facts = [
        ("Servers", ", ".join(followed.urls)), ("Policy", followed.world.policy),
        ("Profile", f"{setting.profile.name}, version {follower.version} ({setting.profile.verdict})"),
        ("SLOs", ", ".join(followed.world.slos) or "none"),
    ]  # fmt: skip
    if last:
        facts.append(("Window", f"{moment(last['begin'])} to {moment(last['end'])[-5:]} UTC"))
    return facts


def _advice(advice: dict[str, str]) -> Section | None:
    if not advice:
        return None
    names = (("Gain", "gain"), ("Evidence", "evidence"))
    words = [f"{name}: {advice[key]}." for name, key in names if advice.get(key)]
    return Section("Recommendation", (Words((advice["do"], *words), loud=True),))


def _second(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _predicted(windows: Sequence[dict[str, Any]]) -> Figure:
    chart = Chart(y="measured / predicted", legend=True, from_zero=False)
    begin, end = windows[0]["begin"], windows[-1]["end"]
    chart.x["range"] = [_second(begin), _second(end + (end - begin) / 30)]  # Plotly's own is of ms for a single point
    times = [_second(w["end"]) for w in windows]
    for index, name in enumerate(n for n in DISTRIBUTIONS if n in windows[-1]["measured"]):
        ratios = [
            w["measured"][name] / w["predicted"][name] if w["measured"].get(name) and w["predicted"].get(name) else None
            for w in windows
        ]
        chart.line(times, ratios, QUANTITIES[name], index, mode=POINTS)
    chart.hline(1.0)
    for w in windows:
        for alarm in w["raised"]:
            chart.vline(_second(alarm["since"]), alarm["cause"])
    caption = "Means of each window, over the last day. 1: as the twin says. A line marks an alarm. UTC."
    return Figure("predicted", "Measured over predicted", caption, chart)


def _residuals(last: dict[str, Any]) -> Any:
    rows = []
    for name, (residual, _) in last["residuals"].items():
        smooth, deviation = last["smooth"].get(name), last["deviations"].get(name)
        if smooth is None or deviation is None or residual is None:
            continue
        usual = "usual" if abs(smooth) < BAND * deviation else "off"
        rows.append(
            (
                QUANTITIES[name], CAUSE_OF[name], f"{math.expm1(residual):+.1%}", f"{math.expm1(smooth):+.1%}",
                f"±{math.expm1(BAND * deviation):.1%}", usual,
            )
        )  # fmt: skip
    return table(
        ("quantity", "cause", "this window", "moving average", "usual", "verdict"), rows,
        caption="Measured against predicted; of traffic, against the usual. While prices or yield are off, the rule's "
        "are against a twin at the measured ones. The usual range is of one window.",
        left=frozenset({0, 1, 5}),
    )  # fmt: skip


def _what_if(last: dict[str, Any]) -> Section | None:
    if not last.get("what_if"):
        return None
    rows = [
        (
            w["name"], f"{w['replicas']}", "–" if w["attainment"] is None else f"{w['attainment']:.1%}",
            "–" if w["e2el_p90"] is None else f"{number(w['e2el_p90'])} s",
        )
        for w in last["what_if"]
    ]  # fmt: skip
    head = ("what if", "replicas", "within the SLOs", "p90 of e2el")
    caption = "Replays of the last two windows' requests."
    return Section("What if", (table(head, rows, caption=caption, left=frozenset({0})),))


def _changes(follower: Follower, windows: Sequence[dict[str, Any]]) -> Section:
    """The alarms of a day, and the profiles that were adopted."""
    lines = [
        f"{moment(v.time)}: profile version {v.number}, {v.factors.words}, from {v.windows} windows "
        f"since {moment(v.begin)} ({v.reason})"
        for v in follower.versions
    ]
    lines += [f"{moment(w['end'])}: alarm, {alarm['words']}" for w in windows for alarm in w["raised"]]
    return Section("What changed", (Words(tuple(sorted(lines)) or ("No alarm, no new profile.",)),))


def shift(window: Mapping[str, Any], name: str) -> str:
    return f"{math.expm1(window['smooth'].get(name) or 0.0):+.1%}"
