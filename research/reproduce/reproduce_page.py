"""The page of published experiments: published and predicted values, each with a status."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ...report.chart import Chart
from ...report.page import Figure, Number, Page, Row, Section, Table, Words
from ...report.table import number

Json = Mapping[str, Any]  # of --json
HEAD = ("series", "at", "measure", "published", "predicted", "error", "what it is")
MOST_CHARTS = 3  # measures of an experiment


def reproduce_page(found: Json, command: str = "") -> Page:
    names = [e["name"] for e in found["experiments"]]
    title = found["experiments"][0]["title"] if len(names) == 1 else f"{len(names)} published experiments"
    made = f"{found['date']}, dsim {found['dsim']}" + (f", commit {found['commit']}" if found["commit"] else "")
    done = found["num_run"] + found["num_reused"]
    return Page(
        name=names[0] if len(names) == 1 else "reproduce",
        question=f"{title}: published and predicted",
        answer=answer(found),
        alarms=(f"INTERRUPTED {done} of {found['num_points']} runs are done and shown",)
        if found["interrupted"]
        else (),
        numbers=tuple(_number(status, s) for status, s in found["summary"].items()),
        facts=(("Made", made),),
        sections=tuple(
            _section(e, [row for row in found["rows"] if row["experiment"] == e["name"]]) for e in found["experiments"]
        ),
        command=command,
        version=found["dsim"],
    )


def answer(found: Json) -> str:
    """Errors by status."""
    parts = []
    for status, s in found["summary"].items():
        text = f"{s['num']} {status}"
        if s["median_error"] is not None:
            text += f" (median error {_percent(s['median_error'])}, at most {_percent(s['worst_error'])})"
        parts.append(text)
    return "; ".join(parts) or "No value is known yet"


def _number(status: str, s: Json) -> Number:
    if s["median_error"] is None:
        return Number(status, ((None, f"{s['num']:,}"),), "values without a published one")
    return Number(status, ((None, f"{100 * s['median_error']:.1f} %"),), f"median error of {s['num']} values")


def _section(e: Json, rows: Sequence[Json]) -> Section:
    shown = []
    for r in rows:
        published = "" if r["published"] is None else f"{number(r['published'])} {r['unit']}"
        error = "" if r["error"] is None else f"{100 * r['error']:+.1f} %"
        cells = (r["series"], r["at"], r["measure"], published, _predicted(r), error, r["status"])
        shown.append(Row(cells, group=r["series"]))
    notes = [f"{e['system']}. {e['citation']}", e["conditions"]]
    for name, of_it in groupby(rows, key=lambda r: r["series"]):
        note = next(of_it)["note"]
        if note:
            notes.append(f"{name}: {note}")
    notes += [f"{r['series']} at {r['at']}: {r['shortage']}" for r in rows if r["shortage"] is not None]
    notes += [
        f"{r['series']} at {r['at']}, {r['measure']}: {number(r['recorded'])} was recorded on {r['recorded_on']}"
        for r in rows
        if r["recorded"] is not None and r["predicted"] is not None and _apart(r["recorded"], r["predicted"])
    ]
    return Section(
        e["title"], (*_figures(e, rows), Table(HEAD, tuple(shown), left=frozenset({0, 2, 6})), Words(tuple(notes))),
        spoken=True,
    )  # fmt: skip


def _figures(e: Json, rows: Sequence[Json]) -> list[Figure]:
    """The first measures: published dots, predicted lines."""
    figures = []
    for measure in list(dict.fromkeys(r["measure"] for r in rows))[:MOST_CHARTS]:
        own = [r for r in rows if r["measure"] == measure and r["predicted"] is not None]
        if len({r["at"] for r in own}) < 2:
            continue
        chart = Chart(e["axis"], own[0]["unit"], legend=True)
        for i, name in enumerate(dict.fromkeys(r["series"] for r in own)):
            line = [r for r in own if r["series"] == name]
            chart.line([r["at"] for r in line], [r["predicted"] for r in line], name, i)
            dots = [r for r in line if r["published"] is not None]
            if dots:
                chart.line(
                    [r["at"] for r in dots], [r["published"] for r in dots], f"{name}, published", i, mode="markers"
                )
        figures.append(Figure(f"{e['name']}-{measure}", measure, "Lines are predicted, dots published.", chart))
    return figures


def _predicted(r: Json) -> str:
    if r["predicted"] is None:
        return "failed"
    half = "" if r["half"] is None else f" ± {number(r['half'])}"
    return f"{number(r['predicted'])}{half} {r['unit']}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _apart(a: float, b: float) -> bool:
    return abs(a - b) > 0.005 * abs(b)
