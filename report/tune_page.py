"""The page of a search: what to run, how sure that is, and what was tried on the way."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd
import plotly.graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from .figures import COLOURS, GRID, HEIGHT, INK
from .html import PLOT, STYLE
from .tune import HIGHER, Json, answer, columns, finalists, row, spelt

QUESTION = "Which settings serve this traffic best?"
EXTRA_STYLE = "td.policy { white-space: normal; overflow-wrap: anywhere; text-align: left; min-width: 220px; }"


def page(info: Json, trials: pd.DataFrame) -> str:
    """The page of a search, from tune.json and the trials; the same search gives the same bytes."""
    figures = _figures(info, trials)
    cards = "".join(
        f'<figure class="card"><h3>{escape(title)}</h3><p class="caption">{escape(caption)}</p>'
        f'<div class="plot" id="{name}" style="height:{HEIGHT}px"></div></figure>'
        for name, (title, caption, _) in figures.items()
    )
    # Named engine: another that happens to be installed would write other bytes.
    plots = "\n".join(
        f'Plotly.newPlot("{name}", Object.assign({to_json(figure, engine="json")}, {{config: {json.dumps(PLOT)}}}));'
        for name, (_, _, figure) in figures.items()
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>dsim tune: {escape(str(info.get('trace', 'a search')))}</title>",
            f"<style>{STYLE}\n{EXTRA_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head><body><main>",
            _header(info),
            _table(info),
            f'<section><h2>The search</h2><div class="grid">{cards}</div></section>',
            _notes(info),
            f"<script>{plots}</script>",
            "</main></body></html>\n",
        ]
    )


def _header(info: Json) -> str:
    parts = [f"<header><h1>{QUESTION}</h1>", f'<p class="answer">{escape(answer(info))}</p>']
    if info.get("estimated"):
        parts.append(
            '<p class="caution"><strong>Estimated, not measured.</strong> The profile '
            f"<code>{escape(str(info['profile']))}</code> was not measured on this device: trust the order of policies "
            "more than the numbers.</p>"
        )
    if info["winner"]["quality"]["relative"] is None:
        reason = " ".join(info["winner"]["quality"]["notes"])
        parts.append(
            '<p class="caution"><strong>Quality unknown.</strong> '
            f"Nobody published what the best setting does to answers: {escape(reason)}.</p>"
        )
    shown = {
        "Trace": info.get("trace"),
        "Profile": info.get("profile"),
        "SLOs": ", ".join(info.get("slos", [])) or "none",
        "Settings tried": info["num_trials"],
        "Replays": info["num_replays"],
        "Confirmed on": f"{info['replications']} replications of the held-out part, paired",
        "Seed": info.get("seed"),
    }
    parts.append("<dl>")
    parts += [f"<div><dt>{name}</dt><dd>{escape(str(v))}</dd></div>" for name, v in shown.items() if v is not None]
    return "".join([*parts, "</dl></header>"])


def _table(info: Json) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["", "policy", *columns(info)])
    body = "".join(
        f'<tr><th scope="row">{escape(role)}</th><td class="policy">{escape(spelt(f))}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row(info, f))
        + "</tr>"
        for role, f in finalists(info)
    )
    return (
        '<section class="card table"><h2>Confirmed</h2><div class="scroll"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
        '<p class="caption">Means over fresh luck and the part of the trace that the search did not see, each with its '
        "95 % interval; changes are paired with the default.</p></section>"
    )


def _figures(info: Json, trials: pd.DataFrame) -> dict[str, tuple[str, str, go.Figure]]:
    names = list(info["objectives"])
    whole = trials[trials["state"] == "complete"]
    found: dict[str, tuple[str, str, go.Figure]] = {}
    if len(names) > 1:
        found["front"] = (
            "The front",
            "Each point a setting in the search; on the line, those that none beats in both.",
            _front(info, whole, names[0], names[1]),
        )
    first = names[0]
    found["history"] = (
        "Trials",
        f"{first} of each setting; the line is the best so far.",
        _history(info, whole, first),
    )
    found["gains"] = (
        "Confirmed gain",
        f"In {first}, on held-out traffic, with 95 % intervals; to the right of zero is better.",
        _gains(info, first),
    )
    if info["importance"]:
        found["importance"] = (
            "What mattered",
            "Share of the difference between good and other settings of the winner's preset that each field explains.",
            _importance(info["importance"]),
        )
    return found


def _history(info: Json, whole: pd.DataFrame, name: str) -> go.Figure:
    figure = _figure("trial", f"{name} ({info['objectives'][name]})")
    feasible = whole["violation"].fillna(0) <= 0
    for preset, group in _by_preset(whole):
        ok = feasible[group.index]
        figure.add_scatter(
            x=group["trial"].tolist(),
            y=group[name].tolist(),
            mode="markers",
            name=preset,
            text=group["policy"].tolist(),
            marker={
                "color": _colour(info, preset),
                "symbol": ["circle" if v else "x-thin-open" for v in ok],
                "size": 7,
            },
        )
    values = whole[name].where(feasible)
    best = values.cummax() if name in HIGHER else values.cummin()
    figure.add_scatter(
        x=whole["trial"].tolist(),
        y=_known(best.ffill()),
        mode="lines",
        name="best so far",
        line={"color": INK, "width": 1.5, "shape": "hv"},
    )
    return figure


def _front(info: Json, whole: pd.DataFrame, x: str, y: str) -> go.Figure:
    units = info["objectives"]
    figure = _figure(f"{x} ({units[x]})", f"{y} ({units[y]})")
    for preset, group in _by_preset(whole):
        figure.add_scatter(
            x=group[x].tolist(),
            y=group[y].tolist(),
            mode="markers",
            name=preset,
            text=group["policy"].tolist(),
            marker={"color": _colour(info, preset), "size": 7},
        )
    points = sorted((f["searched"][x], f["searched"][y], spelt(f)) for f in info["front"])
    figure.add_scatter(
        x=[p[0] for p in points],
        y=[p[1] for p in points],
        text=[p[2] for p in points],
        mode="lines+markers",
        name="front",
        line={"color": INK, "width": 1.5, "shape": "hv"},
        marker={"size": 10, "symbol": "circle-open", "color": INK},
    )
    return figure


def _gains(info: Json, name: str) -> go.Figure:
    figure = _figure("gain over the default", "")
    shown = [
        (role, f) for role, f in finalists(info) if "default" not in role and f["gains"][name]["value"] is not None
    ]
    gains = [f["gains"][name] for _, f in shown]
    figure.add_scatter(
        x=[g["value"] for g in gains],
        y=[role for role, _ in shown],
        mode="markers",
        showlegend=False,
        text=[spelt(f) for _, f in shown],
        marker={"color": COLOURS[0], "size": 9},
        error_x={"type": "data", "array": [g["high"] - g["value"] for g in gains]},
    )
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    figure.update_xaxes(tickformat="+.1%")
    figure.update_yaxes(autorange="reversed")
    return figure


def _importance(importance: Mapping[str, float]) -> go.Figure:
    figure = _figure("share explained", "")
    items = sorted(importance.items(), key=lambda item: item[1])
    figure.add_bar(
        x=[v for _, v in items],
        y=[n for n, _ in items],
        orientation="h",
        marker={"color": COLOURS[0]},
        showlegend=False,
    )
    figure.update_xaxes(tickformat=".0%")
    return figure


def _known(values: "pd.Series[float]") -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in values]


def _by_preset(trials: pd.DataFrame) -> Sequence[tuple[str, pd.DataFrame]]:
    presets = trials["policy"].str.split(",").str[0]
    return [(str(preset), trials[presets == preset]) for preset in dict.fromkeys(presets)]


def _colour(info: Json, preset: str) -> str:
    presets = list(info["space"])
    return COLOURS[presets.index(preset) % len(COLOURS)] if preset in presets else INK


def _figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        margin={"l": 70, "r": 12, "t": 8, "b": 44},
        font={"size": 12, "color": INK},
        legend={"orientation": "h", "y": 1.12},
        hovermode="closest",
    )
    figure.update_xaxes(title=x, gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(title=y, gridcolor=GRID, zeroline=False, automargin=True)
    return figure


def _notes(info: Json) -> str:
    items = "".join(f"<li>{escape(line[0].upper() + line[1:])}.</li>" for line in info["notes"])
    return f"<footer><h2>Notes</h2><ul>{items}</ul></footer>"
