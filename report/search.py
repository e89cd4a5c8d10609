"""The pages of `dsim tune` and `dsim sweep`: the best settings of a search, the best cell of a sweep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..results.metrics import METRICS, Metric, led_by, path
from .chart import COLOURS, INK, LINES, Chart, colour, logarithmic
from .page import Figure, Number, Page, Row, Section, Table, Words, estimate, numbers, priced_apart, table
from .run import front_end
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
    name if metric.of is None else f"{path(name)}_p90": replace(
        metric, title=metric.title if metric.of is None else f"{metric.title}, p90"
    )
    for name in led_by("goodput")
    if (metric := METRICS[name]).title and name != "e2el"
}


def tune_page(tuned: "Tuned") -> Page:
    setup = tuned.setup
    cautions = [estimate(setup.profile)] if setup.estimated else []
    quality = tuned.winner.quality
    if quality.relative is None and not quality.same:
        reason = f"There is no published score for the answers of {tuned.winner.policy}: {' '.join(quality.notes)}."
        cautions.append(("Quality unknown.", reason))
    roles = Words(tuple(f"  {role}: {finalist}" for role, finalist in _finalists(tuned)), loud=True)
    chart, *figures = _figures(tuned)
    facts = {
        "Trace": setup.traffic,
        "Profile": setup.profile + (": estimated, not measured" if setup.estimated else ""),
        "Workload": setup.workload,
        "Front end": front_end(setup.frontend),
        "Router": setup.router,
        "SLOs": ", ".join(setup.slos) or "none",
        "Price": "" if setup.gpu_hour is None else f"{setup.gpu_hour:g} {setup.currency} for a GPU's hour",
        "Search": f"{len(tuned.trials)} settings tried, {tuned.num_replays} replays, seed {setup.seed}",
        "Confirmed on": f"{tuned.replications} replications of the held-out part, paired",
    }
    return Page(
        name=f"dsim tune: {setup.trace}",
        question="Which settings serve this traffic best?",
        answer=_found(tuned),
        cautions=tuple(cautions),
        numbers=_numbers_of(tuned, tuned.recommended),
        chart=chart,
        facts=tuple((name, value) for name, value in facts.items() if value),
        sections=(
            Section("Confirmed", (roles, _confirmed(tuned), Words((f"Run it: {tuned.run}",)))),
            Section("The search", tuple(figures)),
        ),
        notes=tuned.notes,
        command=setup.command,
        version=setup.dsim,
    )


def _found(tuned: "Tuned") -> str:
    """The answer: what to run, its gain, and what the policy to beat misses."""
    name, winner, default, recommended = tuned.objective, tuned.winner, tuned.default, tuned.recommended
    gain = winner.gain
    found_nothing = _same(winner, default)
    if found_nothing:
        text = f"{default}, the default, is the best of the {len(tuned.trials)} settings tried."
    else:
        gained = f"a gain in {name} of {gain_text(gain)} over {default}"
        if gain is None:  # the default's value is zero
            before, after = (f"{finalist.value.value:.4g}" for finalist in (default, winner))
            gained = f"{name} {after} {_unit(tuned)} against {before} of {default}"
        gained += ", on traffic that the search never saw" + priced_apart(tuned.implementations)
        text = f"{winner}: {gained}."
        if not tuned.confirmed:
            text = f"Keep {default}: the best found, {winner}, has {gained}."
    text += "".join(f" {line}." for line in recommended.untested)
    if tuned.equal:
        does = "does" if tuned.equal == 1 else "do"
        text += (
            f" {counted(tuned.equal, 'other setting')} {does} as well within 1 %; this one changes the fewest of the "
            "engine's own settings."
        )
    if default.meets_run_slos < 0.5:
        text += f" The policy to beat misses an SLO on the run in {1 - default.meets_run_slos:.0%} of replays"
        if not found_nothing and winner.meets_run_slos >= 0.5:
            verb = "costs" if name == "cost" else "has"
            text += f"; the best that meets them {verb} {winner.value.value:.4g} {_unit(tuned)}"
        text += "."
    if default.attainment is not None:
        text += f" The policy to beat meets the SLOs for {_share(default.attainment)} of requests"
        text += "." if found_nothing else f", the best for {_share(winner.attainment)}."
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
    return "the default's" if finalist.quality.same else "unknown"


def _same(finalist: "Finalist", other: "Finalist") -> bool:
    return (finalist.policy, finalist.replicas) == (other.policy, other.replicas)


def _finalists(tuned: "Tuned") -> "list[tuple[str, Finalist]]":
    """With their roles."""
    rows = [("winner", tuned.winner)]
    finalists = [(f"{role}, default" if _same(f, tuned.default) else role, f) for role, f in rows]
    return finalists if finalists != rows else [*rows, ("default", tuned.default)]


def _confirmed(tuned: "Tuned") -> Table:
    name = f"{tuned.objective} ({_unit(tuned)})"
    heads = ["", "quality", name, "gain over the default", "requests that meet the SLOs"]
    rows = []
    for role, finalist in _finalists(tuned):
        value = finalist.value
        gain = "" if _same(finalist, tuned.default) else gain_text(finalist.gain)
        attained = "" if finalist.attainment is None else _share(finalist.attainment)
        half = plus_minus(value.value, (value.high - value.low) / 2)
        rows.append([role, _quality(finalist), half, gain, attained])
    filled = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    caption = (
        "Means over new random draws on the part of the trace that the search did not use, with 95 % intervals. Gains "
        f"compare with the default on the same requests. {GAIN}"
    )
    return table([heads[i] for i in filled], [[row[i] for i in filled] for row in rows], caption=caption)


def _numbers_of(tuned: "Tuned", best: "Finalist") -> tuple[Number, ...]:
    name = tuned.objective
    gain = None if _same(tuned.winner, tuned.default) else tuned.winner.gain
    gained = "none" if gain is None else f"{100 * gain.value:+.1f} %"
    rows = [
        (f"gain in {name}", gained, "over the default, on traffic that the search never saw"),
        (name, f"{best.value.value:.4g}", f"{_unit(tuned)}, of the recommended setting"),
    ]
    if best.attainment is not None:
        about = f"the default: {_share(tuned.default.attainment)}"
        rows.append(("requests that meet the SLOs", _share(best.attainment), about))
    rows.append(("replicas", f"{best.replicas}", "of the recommended setting"))
    rows.append(("quality", _quality(best), "of answers, compared with the full cache"))
    return numbers(rows)


def _figures(tuned: "Tuned") -> list[Figure]:
    """The answer's first."""
    name = tuned.objective
    about = f"In {name}, on held-out traffic, with 95 % intervals. {GAIN}"
    gains = Figure("gains", "Confirmed gain", about, _gains(tuned))
    about = (
        f"{name} of each setting, in the colour of its policy: ● meets every SLO with a statistic, ✕ misses one. "
        "The line shows the best so far that meets them."
    )
    return [gains, Figure("history", "Trials", about, _history(tuned))]


def _history(tuned: "Tuned") -> Chart:
    """Points in the colour of their preset."""
    chart = Chart("trial", f"{tuned.objective} ({_unit(tuned)})", legend=True, from_zero=False)
    better = max if tuned.objective in ("goodput", "throughput") else min
    trials = [(trial, trial.value) for trial in tuned.trials if trial.value is not None]
    best: list[float | None] = []
    groups: dict[str, list[tuple[Trial, float]]] = {}
    for trial, value in trials:
        reached = [v for v in (*best[-1:], value if _meets(trial) else None) if v is not None]
        best.append(better(reached, default=None))
        groups.setdefault(trial.policy.split(",")[0], []).append((trial, value))
    shades = {str(preset): COLOURS[i % len(COLOURS)] for i, preset in enumerate(tuned.space["policy"])}
    for name, group in groups.items():
        symbols = ["circle" if _meets(trial) else "x-thin-open" for trial, _ in group]
        chart.add(
            "scatter", x=[trial.trial for trial, _ in group], y=[value for _, value in group], mode="markers",
            name=name, text=[trial.policy for trial, _ in group],
            marker={"color": shades.get(name, INK), "symbol": symbols, "size": 7},
        )  # fmt: skip
    x = [trial.trial for trial, _ in trials]
    chart.add("scatter", x=x, y=best, mode="lines", name="best so far", line=STAIRS)
    return chart


def _meets(trial: "Trial") -> bool:
    return (trial.violation or 0.0) <= 0


def _gains(tuned: "Tuned") -> Chart:
    chart = Chart("gain over the default", "", legend=True, from_zero=False)
    finalists = [(role, f, f.gain) for role, f in _finalists(tuned) if "default" not in role]
    with_gains = [(role, f, gain) for role, f, gain in finalists if gain is not None]
    chart.add(
        "scatter", x=[gain.value for _, _, gain in with_gains], y=[role for role, _, _ in with_gains], mode="markers",
        showlegend=False, text=[str(f) for _, f, _ in with_gains], marker={"color": COLOURS[0], "size": 9},
        error_x={"type": "data", "array": [gain.high - gain.value for _, _, gain in with_gains]},
    )  # fmt: skip
    chart.vline(0.0, dash="solid")
    chart.x["tickformat"] = "+.1~%"
    chart.y["autorange"] = "reversed"
    return chart


# Sweeps


class Place(NamedTuple):
    """Cells that differ only in their seed, averaged."""

    value: float  # NaN: every cell failed
    stable: bool


def sweep_page(sweep: "Sweep") -> Page:
    rows, num_rows = sweep.results, len(sweep.results)
    alarms = []
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
    metrics = {name: metric for name, metric in DRAWN.items() if any(row.get(name) is not None for row in rows)}
    names = [name for name in sweep.varied if name != "seed"]
    judge = next((name for name in ("goodput", "output_throughput") if name in metrics), None)
    best, answer = None, ""
    if judge is not None:
        places = {place: p for place, p in _places(rows, names, judge).items() if p.stable and not math.isnan(p.value)}
        best = max(places, key=lambda place: places[place].value, default=None)
        answer = "No cell is stable: every one is overloaded or failed."
        if best is not None:
            setting = ", ".join(f"{name} = {_label(value)}" for name, value in zip(names, best, strict=True))
            value = f"{number(places[best].value)} {metrics[judge].axis}"
            setting += priced_apart(sweep.implementations)
            answer = f"Highest stable {metrics[judge].title.lower()}: {value} at {setting}."
    means = []
    for name, metric in metrics.items() if best is not None else ():
        mean = _places(rows, names, name)[best or ()].value
        if not math.isnan(mean):
            means.append((metric.title, f"{number(mean * metric.scale)} {metric.axis}", "of the best cell"))
    failed = f"{sweep.num_unstable} overloaded, {sweep.num_failed} failed"
    about = failed if sweep.num_unstable or sweep.num_failed else "finished, none overloaded"
    title, figures = _curves(sweep, metrics)
    ranges = [(name, _range(_values(rows, name))) for name in sweep.varied]
    return Page(
        name=f"dsim: {sweep.title}",
        question="Which of these scenarios serves best?",
        answer=answer,
        alarms=tuple(alarms),
        cautions=(estimate(", ".join(sweep.estimated), "cells"),) if sweep.estimated else (),
        numbers=numbers([*means[:3], ("cells", f"{num_rows} of {sweep.num_cells}", about)]),
        chart=figures[0] if figures else None,
        facts=(("title", sweep.title), *_shared(sweep), *ranges, ("cells", str(num_rows))),
        sections=(
            *((Section(title, tuple(figures[1:])),) if figures[1:] else ()),
            Section("Cells", (_cells(sweep, metrics),)),
        ),
        notes=(
            "Cells with the same seed have the same requests and random draws, so that they compare like with like.",
            "Latencies cover completed requests.",
            *sweep.notes,
        ),
        command=sweep.command,
        version=sweep.dsim,
    )


def _shared(sweep: "Sweep") -> list[tuple[str, str]]:
    """The fields that all cells share, as configured, without folders."""
    shared = []
    for name, value in sweep.config.get("base", {}).items():
        if name not in sweep.varied and not isinstance(value, Mapping):
            shared.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return shared


def _curves(sweep: "Sweep", metrics: Mapping[str, Metric]) -> tuple[str, list[Figure]]:
    """With their section's title; over the first field if none is numeric. The load first, then most values."""
    rows = sweep.results
    values = {name: _values(rows, name) for name in sweep.varied if name != "seed"}
    names = [name for name, all_values in values.items() if len(all_values) > 1]
    axes = [name for name in names if all(map(_is_number, values[name]))]
    axes.sort(key=lambda name: (name not in UNITS, -len(values[name])))
    if not names:
        return "", []
    x = (axes or names)[0]
    curves = [_curve(rows, metric, metrics[metric], x, [n for n in names if n != x], values[x]) for metric in metrics]
    return f"Curves over {x}" if axes else f"Cells by {x}", [curve for curve in curves if curve is not None]


def _curve(
    rows: Sequence[Json], metric: str, spec: Metric, x: str, fields: Sequence[str], xs: Sequence[Any]
) -> Figure | None:
    """One line per setting of the other fields; None if too many."""
    places = _places(rows, [*fields, x], metric)
    settings = list(dict.fromkeys(place[:-1] for place in places))
    if len(settings) > MAX_CURVES:
        return None
    chart = Chart(f"{x} ({UNITS[x]})" if x in UNITS else x, spec.axis)
    numeric = all(map(_is_number, xs))
    values: list[float] = []
    for i, setting in enumerate(settings):
        points = {value: places[*setting, value] for value in xs if (*setting, value) in places}
        points = {value: place for value, place in points.items() if not math.isnan(place.value)}
        y = [place.value * spec.scale for place in points.values()]
        values += y
        pairs = zip(fields, setting, strict=True)
        name = ", ".join(_label(v) if isinstance(v, str) else f"{field} {_label(v)}" for field, v in pairs)
        shade = colour(i)
        chart.add(
            "scatter", x=[value if numeric else _label(value) for value in points], y=y, name=name or spec.title,
            mode="lines+markers" if numeric else "markers", legendgroup=name,
            line={"color": shade, "width": 2, "dash": LINES[i // len(COLOURS)]},
            marker={
                "color": shade, "size": [7 if place.stable else 10 for place in points.values()],
                "symbol": ["circle" if place.stable else "x-thin" for place in points.values()],
                "line": {"width": 2, "color": shade},
            },
        )  # fmt: skip
    if not values:
        return None
    legend_rows = -(-len(settings) // 3) if len(settings) > 1 else 0
    if legend_rows:
        chart.layout |= {"showlegend": True, "legend": {"orientation": "h", "y": -0.28, "font": {"size": 11}}}
    chart.layout["height"] = 300 + 18 * legend_rows
    chart.layout["margin"]["b"] = 50 + 18 * legend_rows
    if spec.better != "high" and min(values) > 0 and max(values) > 30 * min(values):
        logarithmic(chart.y)
        del chart.y["rangemode"]
    better = "" if metric == "busy_share" else f"{'Higher' if spec.better == 'high' else 'Lower'} is better; "
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
        places[place] = Place(float(np.mean(values)) if values else math.nan, stable)
    return places


def _cells(sweep: "Sweep", metrics: Mapping[str, Metric]) -> Table:
    marks = [""] if sweep.num_unstable else []
    head = [*sweep.varied, *(f"{metric.title} ({metric.axis})" for metric in metrics.values()), *marks]
    rows = []
    for row in sweep.results[:MAX_ROWS]:
        cells = [_label(row[name]) for name in sweep.varied]
        if row["error"] is not None:
            rows.append(Row((*cells, row["error"]), failed=True))
            continue
        for name, metric in metrics.items():
            value = row.get(name)
            cells.append(number(None if value is None else value * metric.scale))
        cells += ["✕ overloaded" if row.get("stable") is False else "" for _ in marks]
        rows.append(Row(tuple(cells)))
    caption = "All metrics are in results.csv; dsim metrics prints every formula."
    if len(sweep.results) > MAX_ROWS:
        caption = f"The first {MAX_ROWS} of {len(sweep.results)} cells. {caption}"
    return Table(tuple(head), tuple(rows), caption=caption, left=frozenset())


def _values(rows: Sequence[Json], name: str) -> list[Any]:
    """Numbers sorted, others by appearance."""
    values = list(dict.fromkeys(row[name] for row in rows))
    return sorted(values) if all(map(_is_number, values)) else values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _range(values: Sequence[Any]) -> str:
    labels = [_label(value) for value in values]
    return ", ".join(labels) if len(labels) <= 8 else f"{labels[0]} to {labels[-1]} ({len(labels)} values)"


def _label(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
