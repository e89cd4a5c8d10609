"""The report as one page that needs no network: what was asked, what came out, and the figures behind it."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly.io import to_json
from plotly.offline import get_plotlyjs

from .figures import HEIGHT, Figure, colour, dashed, figures
from .run import Run
from .story import answer, estimated, notes, setting, warnings
from .table import compare

QUESTION = "Which scheduler settings meet the latency target for this traffic?"
PLOT = {"displayModeBar": False, "responsive": True}


def write_html(path: str | Path, run: Run) -> None:
    """Write the report of a run; the same run gives the same bytes."""
    info = run.info
    name = info.get("trace", {}).get("name", "a run")
    sections = figures(run)
    page = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>dsim: {escape(name)}</title>",
        f"<style>{STYLE}</style>",
        f"<script>{get_plotlyjs()}</script>",
        "</head><body><main>",
        _header(run),
        _table(run),
        _legend(run.policies),
        *(_section(title, found) for title, found in sections.items()),
        _notes(run),
        # Drawn when the page is laid out: a figure takes the width that its card has then.
        f"<script>{_plots([f for found in sections.values() for f in found])}\n{TOGGLE}</script>",
        "</main></body></html>\n",
    ]
    Path(path).write_text("\n".join(page), encoding="utf-8")


def _header(run: Run) -> str:
    info = run.info
    policies = info["policies"]
    parts = [f"<header><h1>{escape(info.get('question', QUESTION))}</h1>"]
    if sentence := answer(policies):
        parts.append(f'<p class="answer">{escape(sentence)}</p>')
    parts += [f'<p class="alarm" role="alert">{_loud(line)}</p>' for line in warnings(policies, info)]
    if estimated(info):
        profile = escape(info.get("profile", {}).get("name", "unnamed"))
        parts.append(
            f'<p class="caution"><strong>Estimated, not measured.</strong> The profile <code>{profile}</code> was not '
            "measured on this device: trust the order of policies more than the numbers.</p>"
        )
    parts.append("<dl>")
    parts += [f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in setting(info)]
    return "".join([*parts, "</dl></header>"])


def _loud(line: str) -> str:
    word, rest = line.split(" ", 1)
    return f"<strong>{escape(word)}</strong> {escape(rest)}"


def _table(run: Run) -> str:
    policies = run.info["policies"]
    head = "".join(f'<th scope="col">{_swatch(i)}{escape(p["policy"])}</th>' for i, p in enumerate(policies))
    lines, group = [], ""
    for row in compare(policies):
        if row.group != group:
            group = row.group
            lines.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{2 + len(policies)}">{escape(group)}</th></tr>'
            )
        cells = "".join(
            f'<td class="best" title="best">{escape(cell)}</td>' if i in row.best else f"<td>{escape(cell)}</td>"
            for i, cell in enumerate(row.cells)
        )
        lines.append(
            f'<tr><th scope="row">{escape(row.label)}</th><td class="unit">{escape(row.unit)}</td>{cells}</tr>'
        )
    return (
        '<section class="card table"><h2>Summary</h2><div class="scroll"><table><thead><tr><th></th><th></th>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="caption">Shaded and bold: the best of the policies, or within 0.5 % of it. '
        "<code>dsim metrics</code> prints every formula.</p></section>"
    )


def _legend(policies: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-policy="{escape(name)}">{_swatch(i)}{escape(name)}</button>'
        for i, name in enumerate(policies)
    )
    hint = "<span>click to hide or show; drag in a figure to zoom, double-click to reset</span>"
    return f'<nav aria-label="Policies shown">{buttons}{hint}</nav>'


def _swatch(index: int) -> str:
    ink = colour(index)
    fill = f"repeating-linear-gradient(90deg,{ink} 0 3px,#fff 3px 5px)" if dashed(index) else ink
    return f'<i style="background:{fill}"></i>'


def _section(title: str, found: Sequence[Figure]) -> str:
    cards = "".join(
        f'<figure class="card"><h3>{escape(f.title)}</h3><p class="caption">{escape(f.caption)}</p>'
        f'<div class="plot" id="{f.name}" style="height:{HEIGHT}px"></div></figure>'
        for f in found
    )
    return f'<section><h2>{escape(title)}</h2><div class="grid">{cards}</div></section>'


def _plots(found: Sequence[Figure]) -> str:
    config = json.dumps(PLOT)
    # Named engine: another that happens to be installed would write other bytes. It escapes "</script>" in a name.
    drawn = ((f.name, to_json(f.figure, engine="json")) for f in found)
    return "\n".join(
        f'Plotly.newPlot("{name}", Object.assign({figure}, {{config: {config}}}));' for name, figure in drawn
    )


def _notes(run: Run) -> str:
    lines = [*notes(run.info), "Latencies cover completed requests. Averages over time are weighted by step latency."]
    version = f" by dsim {escape(run.info['dsim'])}" if "dsim" in run.info else ""
    items = "".join(f"<li>{escape(line[0].upper() + line[1:])}</li>" for line in lines)
    command = f"<p>Made{version} with <code>{escape(run.info['command'])}</code></p>" if "command" in run.info else ""
    return f"<footer><h2>Notes</h2><ul>{items}</ul>{command}</footer>"


STYLE = """
:root { color-scheme: light; --ink: #202124; --soft: #5f6368; --rule: #dadce0; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 40px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 18px; margin: 30px 0 10px; }
h3 { font-size: 15px; margin: 0; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .92em; }
.answer { font-size: 18px; margin: 0 0 14px; }
.alarm, .caution { margin: 0 0 8px; padding: 9px 14px; border-radius: 6px; border-left: 5px solid; }
.alarm { background: #fce8e6; border-color: #c5221f; }
.alarm strong { color: #a50e0e; }
.caution { background: #fef7e0; border-color: #e69f00; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 14px 0 18px; }
dt { font-size: 12px; color: var(--soft); }
dd { margin: 0; }
.card { background: #fff; border: 1px solid var(--rule); border-radius: 8px; }
.card { padding: 14px 16px; margin: 0; min-width: 0; }
.card h2 { margin-top: 0; }
.caption { margin: 0; color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
.grid .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px; text-align: right; white-space: nowrap; }
th:first-child, td.unit { text-align: left; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; min-width: 120px; }
thead th { white-space: normal; overflow-wrap: anywhere; }
thead th:nth-child(-n+2) { min-width: 0; }
tbody th { font-weight: 400; }
tbody tr:not(.group):hover { background: #f1f3f4; }
tr.group th { padding-top: 12px; font-size: 12px; font-weight: 600; color: var(--soft); }
tr.group th { border-bottom: 1px solid var(--rule); }
td.unit { color: var(--soft); font-size: 13px; }
td.best { font-weight: 650; background: #e8f2fa; }
i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
nav { position: sticky; top: 0; z-index: 5; display: flex; flex-wrap: wrap; gap: 8px; align-items: center; }
nav { margin: 16px -24px 0; padding: 10px 24px; background: #f6f7f9f2; border-bottom: 1px solid var(--rule); }
nav button { font: inherit; font-size: 14px; padding: 4px 12px; cursor: pointer; }
nav button { background: #fff; border: 1px solid var(--rule); border-radius: 16px; }
nav button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
nav span { color: var(--soft); font-size: 13px; }
footer { color: var(--soft); font-size: 14px; }
footer h2 { color: var(--ink); }
@media print {
  body { background: #fff; font-size: 12px; }
  main { max-width: none; padding: 0; }
  nav { position: static; margin: 12px 0 0; padding: 6px 0; }
  nav span { display: none; }
  figure.card, .alarm, .caution, tr { break-inside: avoid; }
  .alarm, .caution, td.best, i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()

TOGGLE = """
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const plot of document.querySelectorAll(".plot")) {
      const rows = plot.data.flatMap((line, i) => line.legendgroup === button.dataset.policy ? [i] : []);
      if (rows.length) Plotly.restyle(plot, {visible: shown}, rows);
    }
  });
}
""".strip()
