"""A capacity in words, as a table and as a page: how much a fleet sustains, what binds, and the latency-rate curve."""

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from ..engine.errors import DsimError
from .figures import COLOURS, GRID, HEIGHT, INK
from .html import PLOT, STYLE
from .table import number

FILES = ("capacity.json", "report.html")
Json = Mapping[str, Any]  # what `dsim capacity --json` prints
BARS = "▁▂▃▄▅▆▇█"


def answer(found: Json) -> str:
    """The capacity in one sentence."""
    fleet = _fleet(found["replicas"])
    sure = f"{span(found['rate'])} at {100 * found['confidence']:g}% confidence"
    if found["asked_rate"] is not None:
        return f"{found['asked_rate']:g} req/s needs {fleet}, which sustain{_s(found['replicas'])} {sure}"
    return f"{found['policy']} sustains {sure} on {fleet}"


def span(rate: Json) -> str:
    """An interval with the digits that it deserves: `5.28 req/s (5.16 to 5.41)`."""
    value, low, high = rate["value"], rate["low"], rate["high"]
    if high is None:
        return f"about {value:.2g} req/s"
    places = max(0, 1 - math.floor(math.log10((high - low) / 2))) if high > low else 4
    return f"{value:,.{places}f} req/s ({low:,.{places}f} to {high:,.{places}f})"


def warnings(found: Json) -> list[str]:
    """What a reader must know before the number."""
    lines = []
    if found["interrupted"]:
        lines.append(f"INTERRUPTED: this is what {len(found['replications'])} replications say")
    elif found["rate"]["high"] is None or _half(found["rate"]) > found["precision"]:
        lines.append(
            f"WIDE: the interval is ±{100 * _half(found['rate']):.2g}% after {len(found['replications'])} "
            f"replications, {100 * found['precision']:g}% was asked: allow more, or give --num-requests more"
        )
    if found["rejected"] > 0:
        lines.append(f"REJECTED: {100 * found['rejected']:.2g}% of requests can never fit and are no load")
    return lines


def facts(found: Json) -> list[tuple[str, str]]:
    """What the capacity rests on, as (name, value)."""
    lines = []
    if found["one_fewer"] is not None:
        lines.append(("One replica less", f"sustains {span(found['one_fewer'])}, which is too little or unsure"))
    if found["binding_slo"] == "stability":
        binding = "none: the queue grows without end first"
    else:
        binding = found["binding_slo"]
    lines.append(("Binding SLO", f"{binding} (in {100 * found['binding_share']:.0f}% of replications)"))
    if found["shares"]:
        shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in found["shares"].items() if share >= 0.005)
        lines.append(("Limited by", f"{found['limited_by']} (of the busy time: {shares})"))
    if found["cost"] is not None:
        cost = found["cost"]
        lines.append(
            (
                "Cost",
                f"{cost['per_hour']:,.2f} an hour for {cost['gpus']} GPU{_es(cost['gpus'])}, "
                f"{cost['per_million_requests']:,.2f} per million requests",
            )
        )
    verdict = ": estimated, not measured" if found["estimated"] else ""
    lines.append(("Profile", found["profile"] + verdict))
    lines.append(
        (
            "Search",
            f"{found['num_replays']} replays of {found['num_requests']:,} requests, {len(found['replications'])} "
            f"replications, resampled {found['block']:,} requests at a time",
        )
    )
    return lines


def curve_rows(found: Json) -> tuple[list[str], list[list[str]]]:
    """The latency-rate curve as a table: its head and its rows."""
    names = list(found["bounds"])
    head = ["req/s", *names, "", ""]
    top = {name: max((p["values"][name] or 0.0 for p in found["curve"]), default=0.0) or 1.0 for name in names}
    rows = []
    for point in found["curve"]:
        first = point["values"][names[0]] or 0.0
        bar = BARS[min(len(BARS) - 1, int(first / top[names[0]] * len(BARS)))]
        verdict = "meets all" if point["holds"] else "violated" if point["stable"] else "unstable"
        rows.append(
            [number(point["rate"]), *(_shown(found, name, point["values"][name]) for name in names), bar, verdict]
        )
    return head, rows


def write(folder: str | Path, found: Json, *, force: bool = False) -> None:
    """Write capacity.json and report.html; the same capacity gives the same bytes."""
    folder = check(folder, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)
        (folder / FILES[0]).write_text(text + "\n", encoding="utf-8")
        (folder / FILES[1]).write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise DsimError(f"{folder}: cannot be written: {error.strerror}") from error


def check(folder: str | Path, *, force: bool = False) -> Path:
    """The folder, if it may be written to."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DsimError(f"{folder}: is a file, expected a folder to write to")
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in held if name not in FILES]
    if foreign:
        raise DsimError(f"{folder}: holds {foreign[0]}, which is not of a capacity: choose another folder")
    if held and not force:
        raise DsimError(f"{folder}: exists and holds {', '.join(held)}: choose another folder or pass --force")
    return folder


def page(found: Json) -> str:
    """The report as one page that needs no network."""
    drawn = [(f"curve-{i}", name, _figure(found, name)) for i, name in enumerate(found["bounds"])]
    caution = (
        f'<p class="caution"><strong>Estimated, not measured.</strong> The profile <code>{escape(found["profile"])}'
        "</code> was not measured on this device.</p>"
        if found["estimated"]
        else ""
    )
    cards = "".join(
        f'<figure class="card"><h3>{escape(name)}</h3><p class="caption">Mean and extremes of replications at each '
        f'rate. Dashed: the bound. Shaded: the capacity\'s interval.</p><div class="plot" id="{key}" '
        f'style="height:{HEIGHT}px"></div></figure>'
        for key, name, _ in drawn
    )
    head, rows = curve_rows(found)
    keep = [i for i, name in enumerate(head) if name]
    table = "".join(f"<tr>{''.join(f'<td>{escape(row[i])}</td>' for i in [*keep, len(row) - 1])}</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{escape(head[i])}</th>' for i in keep) + "<th></th>"
    config = json.dumps(PLOT)
    plots = "\n".join(
        f'Plotly.newPlot("{key}", Object.assign({to_json(figure, engine="json")}, {{config: {config}}}));'
        for key, _, figure in drawn
        if found["curve"]
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>dsim: capacity of {escape(found['policy'])}</title>",
            f"<style>{STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head><body><main><header><h1>How much traffic meets the SLOs?</h1>",
            f'<p class="answer">{escape(answer(found))}.</p>',
            *(f'<p class="alarm" role="alert">{escape(line)}</p>' for line in warnings(found)),
            caution,
            "<dl>",
            *(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(found)),
            f"</dl></header><section><h2>Latency against rate</h2><div class='grid'>{cards}</div></section>",
            '<section class="card table"><h2>The curve in numbers</h2><div class="scroll"><table>'
            f"<thead><tr>{titles}</tr></thead><tbody>{table}</tbody></table></div></section>",
            f"<script>{plots}</script>",
            "</main></body></html>\n",
        ]
    )


def _figure(found: Json, name: str) -> go.Figure:
    share = _is_share(found, name)
    points = [p for p in found["curve"] if p["values"][name] is not None]
    x = [p["rate"] for p in points]
    y, low, high = ([p[key][name] for p in points] for key in ("values", "low", "high"))
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines+markers", line={"color": COLOURS[0], "width": 2}, name=name,
            marker={"symbol": ["circle" if p["stable"] else "x" for p in points], "size": 8},
            error_y={
                "type": "data", "symmetric": False, "array": [b - a for a, b in zip(y, high, strict=True)],
                "arrayminus": [b - a for a, b in zip(low, y, strict=True)], "width": 3, "thickness": 1,
            },
            hovertemplate="%{y:.3~g} at %{x:.3~g} req/s",
        )
    )  # fmt: skip
    rate = found["rate"]
    if rate["high"] is not None:
        figure.add_vrect(x0=rate["low"], x1=rate["high"], fillcolor=COLOURS[2], opacity=0.25, line_width=0)
    figure.add_vline(x=rate["value"], line={"color": COLOURS[2], "width": 1.5})
    figure.add_hline(y=found["bounds"][name], line={"color": INK, "width": 1.2, "dash": "dash"})
    axis = {"gridcolor": GRID, "linecolor": "#bdc1c6", "zeroline": False, "automargin": True, "rangemode": "tozero"}
    figure.update_layout(
        template=go.layout.Template(), height=HEIGHT, showlegend=False, paper_bgcolor="white", plot_bgcolor="white",
        margin={"l": 56, "r": 18, "t": 22, "b": 36}, font={"size": 12, "color": INK},
    )  # fmt: skip
    figure.update_xaxes(**axis, title_text="requests per second")
    figure.update_yaxes(**axis, title_text="share of arrivals" if share else "ms")
    if share:
        figure.update_yaxes(tickformat=".0~%", range=[0, 1.02])
    return figure


def _is_share(found: Json, name: str) -> bool:
    return name in found["share_criteria"]


def _shown(found: Json, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if _is_share(found, name) else f"{number(value)} ms"


def _half(rate: Json) -> float:
    return math.inf if rate["high"] is None else (rate["high"] - rate["low"]) / (2 * rate["value"])


def _fleet(replicas: int) -> str:
    return f"{replicas} replica{_es(replicas)}"


def _es(count: int) -> str:
    return "" if count == 1 else "s"


def _s(count: int) -> str:
    return "s" if count == 1 else ""
