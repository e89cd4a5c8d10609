"""The pages of `dsim tune` and `dsim sweep`: the best settings of a search, the best cell of a sweep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..results.metrics import LATENCIES, METRICS, Metric, led_by, path
from .chart import COLOURS, INK, LINES, Chart, colour, logarithmic
from .page import (
    Block,
    Code,
    Figure,
    Number,
    Page,
    Row,
    Section,
    Table,
    Words,
    estimate,
    facts_of,
    numbers,
    priced_apart,
    table_of,
)
from .run_page import front_end
from .table import counted, number, percent, plus_minus

if TYPE_CHECKING:
    from ..planner.replicate import Interval
    from ..planner.search import Trial
    from ..planner.sweep import Sweep
    from ..planner.tune import Finalist, Tuned

Json = Mapping[str, Any]  # of --json
GAIN = "A gain above zero is better: more goodput or throughput, less cost or latency."
STAIRS = {"color": INK, "width": 1.5, "shape": "hv"}
UNITS = {"rate": "req/s", "concurrency": "requests"}  # on the x axis
MAX_ROWS = 500  # of the table
MAX_CURVES = len(COLOURS) * len(LINES)
# By column of a sweep. ttft and norm_latency show what e2el would.
DRAWN = {
    name if name not in LATENCIES else f"{path(name)}_p90": replace(
        metric, title=metric.title + ", p90" * (name in LATENCIES)
    )
    for name in led_by("goodput")
    if (metric := METRICS[name]).title and name != "e2el"
}


def tune_page(tuned: "Tuned") -> Page:
    setup, quality, cautions = tuned.setup, tuned.winner.quality, []
    if setup.estimated:
        cautions.append(estimate(setup.profile))
    if quality.relative is None and not quality.same:
        cautions.append(("Quality unknown.", f"{tuned.winner.policy}: {' '.join(quality.notes)}."))
    roles = Words(tuple(f"  {role}: {finalist}" for role, finalist in _finalists(tuned)), loud=True)
    facts = {
        "Trace": setup.traffic,
        "Profile": setup.profile + ": estimated, not measured" * setup.estimated,
        "Workload": setup.workload or "",
        "Front end": front_end(setup.frontend),
        "Router": setup.router,
        "SLOs": ", ".join(setup.slos) or "none",
        "Search": f"{len(tuned.trials)} settings tried, {tuned.num_replays} replays, seed {setup.seed}",
        "Confirmed on": f"{tuned.replications} replications of the held-out part, paired",
    }
    if setup.gpu_hour is not None:
        facts["Price"] = f"{setup.gpu_hour:g} {setup.currency} for a GPU's hour"
    about = (
        f"{tuned.objective} of each setting, in the colour of its policy: ● meets every SLO with a statistic, ✕ misses "
        "one. The line shows the best so far that meets them."
    )
    launch: list[Block] = [Words(("Start a replica of it:",)), Code(tuned.launch)] * bool(tuned.launch)
    return Page(
        name=f"dsim tune: {setup.trace}",
        question="Which settings serve this traffic best?",
        answer=_found(tuned),
        cautions=tuple(cautions),
        numbers=_numbers_of(tuned, tuned.recommended),
        chart=Figure("history", "Trials", about, _history(tuned)),
        facts=facts_of(facts),
        sections=(Section("Confirmed", (roles, _confirmed(tuned), Words((f"Run it: {tuned.run}",)), *launch)),),
        notes=tuned.notes,
        command=setup.command,
        version=setup.dsim,
    )


def _found(tuned: "Tuned") -> str:
    """The answer: what to run, its gain, and what the policy to beat misses."""
    name, winner, default, recommended = tuned.objective, tuned.winner, tuned.default, tuned.recommended
    found_nothing = _same(winner, default)
    gained = f"a gain in {name} of {gain_text(winner.gain)} over {default}"
    if winner.gain is None:  # the default's value is zero
        before, after = (f"{finalist.value.value:.4g}" for finalist in (default, winner))
        gained = f"{name} {after} {_unit(tuned)} against {before} of {default}"
    gained += ", on traffic that the search never saw" + priced_apart(tuned.implementations)
    text = f"{winner}: {gained}."
    if found_nothing:
        text = f"{default}, the default, is the best of the {len(tuned.trials)} settings tried."
    elif not tuned.confirmed:
        text = f"Keep {default}: the best found, {winner}, has {gained}."
    if not found_nothing and winner.quality.relative is None and not winner.quality.same:
        text += f" Whether it answers as well is unknown: {' '.join(winner.quality.notes)}."
    text += "".join(f" {line}." for line in (*recommended.untested, *tuned.doubted))
    if tuned.equal:
        text += (
            f" As good within 1 %: {counted(tuned.equal, 'other setting')}; this one changes the fewest of the "
            "engine's own settings."
        )
    if default.meets_run_slos < 0.5:
        text += f" The policy to beat misses an SLO on the run in {1 - default.meets_run_slos:.0%} of replays"
        if not found_nothing and winner.meets_run_slos >= 0.5:
            text += f"; the best that meets them has a {name} of {winner.value.value:.4g} {_unit(tuned)}"
        text += "."
    if default.attainment is not None:
        text += f" The policy to beat meets the SLOs for {_share(default.attainment)} of requests"
        text += f", the best for {_share(winner.attainment)}" * (not found_nothing) + "."
    return text


def gain_text(gain: "Interval | None") -> str:
    """Positive is better."""
    if gain is None:
        return "unknown"
    return f"{100 * gain.value:+.1f} % (95 %: {100 * gain.low:+.1f} to {100 * gain.high:+.1f})"


def _unit(tuned: "Tuned") -> str:
    return tuned.unit.replace("$", tuned.setup.currency)


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{percent(value)} %"


def _quality(finalist: "Finalist") -> str:
    """In percent of the full cache's."""
    if finalist.quality.relative is not None:
        return f"{100 * finalist.quality.relative:.1f} %"
    return {True: "the default's", False: "unknown"}[finalist.quality.same]


def _same(finalist: "Finalist", other: "Finalist") -> bool:
    return (finalist.policy, finalist.replicas) == (other.policy, other.replicas)


def _finalists(tuned: "Tuned") -> "list[tuple[str, Finalist]]":
    """With their roles."""
    if _same(tuned.winner, tuned.default):
        return [("winner, default", tuned.winner)]
    return [("winner", tuned.winner), ("default", tuned.default)]


def _confirmed(tuned: "Tuned") -> Table:
    name = f"{tuned.objective} ({_unit(tuned)})"
    rows = []
    for role, finalist in _finalists(tuned):
        value = finalist.value
        row = {"": role, "quality": _quality(finalist)}
        row[name] = plus_minus(value.value, (value.high - value.low) / 2)
        row["gain over the default"] = gain_text(finalist.gain) * (not _same(finalist, tuned.default))
        row["requests that meet the SLOs"] = _share(finalist.attainment) * (finalist.attainment is not None)
        rows.append(row)
    caption = (
        "Means over new random draws on the part of the trace that the search did not use, with 95 % intervals. Gains "
        f"compare with the default on the same requests. {GAIN}"
    )
    return table_of(rows, caption, ("",))


def _numbers_of(tuned: "Tuned", best: "Finalist") -> tuple[Number, ...]:
    name, gain = tuned.objective, "none"
    if not _same(tuned.winner, tuned.default):
        gain = gain_text(tuned.winner.gain).partition(" (")[0]
    rows = [
        (f"gain in {name}", gain, "over the default, on traffic that the search never saw"),
        (name, f"{best.value.value:.4g}", f"{_unit(tuned)}, of the recommended setting"),
    ]
    if best.attainment is not None:
        about = f"the default: {_share(tuned.default.attainment)}"
        rows.append(("requests that meet the SLOs", _share(best.attainment), about))
    rows.append(("replicas", f"{best.replicas}", "of the recommended setting"))
    rows.append(("quality", _quality(best), "of answers, compared with the full cache"))
    return numbers(rows)


def _history(tuned: "Tuned") -> Chart:
    """Points in the colour of their preset, and the best so far that meets the SLOs."""
    chart = Chart("trial", f"{tuned.objective} ({_unit(tuned)})", legend=True, from_zero=False)
    better = max if tuned.objective in ("goodput", "throughput") else min
    best: dict[int, float] = {}
    for i, preset in enumerate(tuned.space["policy"]):
        trials = [trial for trial in tuned.trials if trial.policy.split(",")[0] == preset and trial.value is not None]
        symbols = [{True: "circle", False: "x-thin-open"}[_meets(trial)] for trial in trials]
        chart.add(
            "scatter",
            x=[trial.trial for trial in trials],
            y=[trial.value for trial in trials],
            mode="markers",
            name=str(preset),
            text=[trial.policy for trial in trials],
            marker={"color": colour(i), "symbol": symbols, "size": 7},
        )
    reached = []
    for trial in tuned.trials:
        if trial.value is None:
            continue
        if _meets(trial):
            reached.append(trial.value)
        if reached:
            best[trial.trial] = better(reached)
    chart.add("scatter", x=list(best), y=list(best.values()), mode="lines", name="best so far", line=STAIRS)
    return chart


def _meets(trial: "Trial") -> bool:
    return (trial.violation or 0.0) <= 0


# Sweeps


class Place(NamedTuple):
    """Cells that differ only in their seed, averaged."""

    value: float  # NaN: every cell failed
    stable: bool


def sweep_page(sweep: "Sweep") -> Page:
    rows, num_rows = sweep.results, len(sweep.results)
    alarms, cautions = [], []
    if sweep.interrupted:
        alarms.append(
            f"INTERRUPTED {num_rows} of {sweep.num_cells} cells are finished and shown; the same command continues."
        )
    if sweep.num_failed:
        alarms.append(f"FAILED {sweep.num_failed} of {num_rows} cells: see the table.")
    if sweep.num_unstable:
        alarms.append(
            f"OVERLOADED {sweep.num_unstable} of {num_rows} cells, marked ✕: their queue grows without bound, and "
            "their latencies measure the length of the trace."
        )
    if sweep.estimated:
        cautions.append(estimate(", ".join(sweep.estimated), "cells"))
    metrics = {name: metric for name, metric in DRAWN.items() if any(row.get(name) is not None for row in rows)}
    names = [name for name in sweep.varied if name != "seed"]
    judge = next((name for name in ("goodput", "output_throughput") if name in metrics), "")
    places = {place: p for place, p in _places(rows, names, judge).items() if p.stable and not math.isnan(p.value)}
    best = max(places, key=lambda place: places[place].value, default=None)
    answer, means = "No cell is stable: every one is overloaded or failed.", []
    if best is not None:
        setting = ", ".join(f"{name} = {_label(value)}" for name, value in zip(names, best, strict=True))
        value = f"{number(places[best].value)} {metrics[judge].axis}"
        setting += priced_apart(sweep.implementations)
        answer = f"Highest stable {metrics[judge].title.lower()}: {value} at {setting}."
        for name, metric in metrics.items():
            mean = _places(rows, names, name)[best].value
            means.append((metric.title, f"{number(mean * metric.scale)} {metric.axis}", "of the best cell"))
    about = f"{sweep.num_unstable} overloaded, {sweep.num_failed} failed"
    figures = _curves(sweep, metrics)
    facts = [(name, ", ".join(map(_label, _values(rows, name)))) for name in sweep.varied]
    for name, field in sweep.config.get("base", {}).items():
        if name not in sweep.varied and not isinstance(field, Mapping):
            facts.append((name, str(field)))
    sections = [Section("Curves", tuple(figures[1:])), Section("Cells", (_cells(sweep, metrics),))]
    return Page(
        name=f"dsim: {sweep.title}",
        question="Which of these scenarios serves best?",
        answer=answer + "".join(f" {line}." for line in sweep.doubted),
        alarms=tuple(alarms),
        cautions=tuple(cautions),
        numbers=numbers([*means[:3], ("cells", f"{num_rows} of {sweep.num_cells}", about)]),
        chart=next(iter(figures), None),
        facts=tuple(facts),
        sections=tuple(section for section in sections if section.blocks),
        notes=(
            "Cells with the same seed have the same requests and random draws, so that they compare like with like.",
            "Latencies cover completed requests.",
            *sweep.notes,
        ),
        command=sweep.command,
        version=sweep.dsim,
    )


def _curves(sweep: "Sweep", metrics: Mapping[str, Metric]) -> list[Figure]:
    """Over the load, else over the numeric field with most values, else over the first field."""
    values = {name: _values(sweep.results, name) for name in sweep.varied if name != "seed"}
    names = [name for name, all_values in values.items() if len(all_values) > 1]
    axes = [name for name in names if all(map(_is_number, values[name]))]
    axes.sort(key=lambda name: (name not in UNITS, -len(values[name])))
    for x in (axes or names)[:1]:
        fields = [name for name in names if name != x]
        curves = [_curve(sweep.results, metric, spec, x, fields) for metric, spec in metrics.items()]
        return [curve for curve in curves if curve.chart.data]
    return []


def _curve(rows: Sequence[Json], metric: str, spec: Metric, x: str, fields: Sequence[str]) -> Figure:
    """One line per setting of the other fields, of the first MAX_CURVES."""
    places = _places(rows, [*fields, x], metric)
    settings = list(dict.fromkeys(place[:-1] for place in places))[:MAX_CURVES]
    xs = _values(rows, x)
    chart = Chart(x, spec.axis, legend=len(settings) > 1)
    if x in UNITS:
        chart.x["title"]["text"] = f"{x} ({UNITS[x]})"
    mode = "markers" if not all(map(_is_number, xs)) else "lines+markers"
    for i, setting in enumerate(settings):
        points = {value: places[*setting, value] for value in xs if (*setting, value) in places}
        points = {value: place for value, place in points.items() if not math.isnan(place.value)}
        name = ", ".join(f"{field} {_label(value)}" for field, value in zip(fields, setting, strict=True))
        symbols = [{True: "circle", False: "x-thin"}[place.stable] for place in points.values()]
        if points:
            chart.line(
                list(points),
                [place.value * spec.scale for place in points.values()],
                name or spec.title,
                i,
                mode=mode,
                marker={"color": colour(i), "size": 8, "symbol": symbols, "line": {"width": 2, "color": colour(i)}},
            )
    values = [value for line in chart.data for value in line["y"]]
    if spec.better != "high" and min(values, default=0) > 0 and max(values) > 30 * min(values):
        logarithmic(chart.y)
        del chart.y["rangemode"]
    better = {"high": "Higher is better; ", "low": "Lower is better; "}.get(spec.better, "")
    return Figure(f"curve-{metric}", spec.title, f"{better}✕ is overloaded.", chart)


def _places(rows: Sequence[Json], names: Sequence[str], metric: str) -> dict[tuple[Any, ...], Place]:
    """By these fields' values, averaged over the others."""
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    places = {}
    for place, cells in groups.items():
        values = [row[metric] for row in cells if row.get(metric) is not None]
        stable = all(row.get("stable") is not False for row in cells)
        places[place] = Place(float(np.mean(values or [math.nan])), stable)
    return places


def _cells(sweep: "Sweep", metrics: Mapping[str, Metric]) -> Table:
    head = [*sweep.varied, *(f"{metric.title} ({metric.axis})" for metric in metrics.values()), ""]
    rows = []
    for row in sweep.results[:MAX_ROWS]:
        cells = [_label(row[name]) for name in sweep.varied]
        if row["error"] is not None:
            rows.append(Row((*cells, row["error"]), failed=True))
            continue
        for name, metric in metrics.items():
            cells.append("–")
            if row.get(name) is not None:
                cells[-1] = number(row[name] * metric.scale)
        rows.append(Row((*cells, "✕ overloaded" * (row.get("stable") is False))))
    caption = f"At most {MAX_ROWS} cells. All metrics are in results.csv."
    return Table(tuple(head), tuple(rows), caption=caption, left=frozenset())


def _values(rows: Sequence[Json], name: str) -> list[Any]:
    """Numbers sorted, others by appearance."""
    values = list(dict.fromkeys(row[name] for row in rows))
    if all(map(_is_number, values)):
        values.sort()
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
