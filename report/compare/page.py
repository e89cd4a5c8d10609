"""A comparison as a page that needs no network: warnings and the answer first, then policy by policy."""

import json
from collections.abc import Sequence
from html import escape

from plotly.io import to_json
from plotly.offline import get_plotlyjs

from ..figures import HEIGHT, Figure
from ..html import PLOT, STYLE
from ..run import Run
from . import words
from .comparison import Cell, Comparison
from .figures import of_cell, overview

QUESTION = "How far is the twin from the device?"
EXTRA_STYLE = "section section.card, details { margin: 14px 0; } thead th { overflow-wrap: normal; }"


def page(found: Comparison, pairs: Sequence[tuple[Run, Run]]) -> str:
    """The page; the same comparison gives the same bytes."""
    drawn = overview(found)
    sections = [f'<section><h2>All policies</h2><div class="grid">{_cards(drawn)}</div></section>']
    sections += [_table(f"Ranking of {', '.join(r.cells)}", words.ranking_table(found, r)) for r in found.rankings]
    for i, cell in enumerate(found.cells):
        figures = of_cell(found, i, pairs[cell.pair])
        sections.append(_cell(found, cell, figures))
        drawn += figures
    # Named engine: another that happens to be installed would write other bytes.
    plots = "\n".join(
        f'Plotly.newPlot("{f.name}", Object.assign({to_json(f.figure, engine="json")}, '
        f"{{config: {json.dumps(PLOT)}}}));"
        for f in drawn
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>dsim compare</title>",
            f"<style>{STYLE}\n{EXTRA_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head><body><main>",
            _header(found),
            *sections,
            _notes(found),
            f"<script>{plots}</script>",
            "</main></body></html>\n",
        ]
    )


def _header(found: Comparison) -> str:
    parts = [f"<header><h1>{QUESTION}</h1>", f'<p class="answer">{escape(words.answer(found))}</p>']
    for line in words.warnings(found):
        parts.append(f'<p class="alarm" role="alert">{escape(line)}</p>')
    parts += [f'<p class="alarm" role="alert">{escape(str(b))}</p>' for b in found.bounds if not b.met]
    parts.append("<dl>")
    for i, pair in enumerate(found.pairs):
        which = f" {i + 1}" if len(found.pairs) > 1 else ""
        for head, side in zip(words.heads(pair), pair, strict=True):
            parts.append(f"<div><dt>{escape(head.capitalize())}{which}</dt><dd>{escape(words.about(side))}</dd></div>")
    kept = ", ".join(f"{b.bound} ({b.cell})" for b in found.bounds if b.met)
    if kept:
        parts.append(f"<div><dt>Bounds kept</dt><dd>{escape(kept)}</dd></div>")
    return "".join([*parts, "</dl></header>"])


def _cell(found: Comparison, cell: Cell, figures: Sequence[Figure]) -> str:
    runs, requests = words.error_table(found, cell), words.request_table(cell)
    about = [words.left_out_line(cell)]
    errors = _table("Errors of the runs", runs, words.step_lines(found, cell) + (about if cell.unpaired else []))
    if not cell.unpaired:
        errors += _table("Errors of the requests", requests, about)
    made_of = f'<p class="caption">{escape(" ".join(words.part_lines(cell)))}</p>'
    if cell.parts is not None:
        split = words.parts_table(found, cell)
        made_of = _table("The error of each mean, and its parts", split, words.part_lines(cell))
    whole = _table("Every number", words.full_table(found, cell))
    return (
        f'<section><h2>{escape(cell.name)}</h2>{errors}{made_of}<div class="grid">{_cards(figures)}</div>'
        f"<details><summary>Every number of {escape(cell.name)}</summary>{whole}</details></section>"
    )


def _cards(figures: Sequence[Figure]) -> str:
    return "".join(
        f'<figure class="card"><h3>{escape(f.title)}</h3><p class="caption">{escape(f.caption)}</p>'
        f'<div class="plot" id="{f.name}" style="height:{HEIGHT}px"></div></figure>'
        for f in figures
    )


def _table(title: str, table: words.Table, lines: Sequence[str] = ()) -> str:
    head, rows = table
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<section class="card table"><h3>{escape(title)}</h3><div class="scroll"><table><thead><tr>{titles}</tr>'
        f'</thead><tbody>{body}</tbody></table></div><p class="caption">{escape(" ".join(lines))}</p></section>'
    )


def _notes(found: Comparison) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in [*found.notes, *words.definition_lines()])
    return f"<footer><h2>What the words mean</h2><ul>{items}</ul></footer>"
