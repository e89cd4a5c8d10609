"""A capacity as a page: the latency-rate curves with their bounds and the interval."""

import json
from html import escape

import plotly.graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from .capacity import Json, answer, curve_rows, facts, is_share, warnings
from .figures import COLOURS, GRID, HEIGHT, INK
from .html import PLOT, STYLE


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
    share = is_share(found, name)
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
