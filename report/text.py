"""The report on a terminal: warnings first, then policies side by side."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .manifest import Manifest
from .metrics import Summary
from .story import answer, notes, setting, warnings
from .table import Row, compare

LABEL_WIDTH = 30  # of a metric and its unit
MAX_COLUMNS = 8  # policies side by side in a pipe


def render(summaries: Sequence[Summary | dict[str, Any]], manifest: Manifest, console: Console) -> None:
    """Print the report; in a pipe as plain text, as wide as it needs to be. A summary may be what run.json holds."""
    policies = [summary.to_json() if isinstance(summary, Summary) else summary for summary in summaries]
    names = [policy["policy"] for policy in policies]
    fits = len(names) <= MAX_COLUMNS
    if console.is_terminal:
        fits = LABEL_WIDTH + sum(max(len(name), 10) + 3 for name in names) <= console.width
    else:
        console = Console(file=console.file, width=10_000, color_system=None, highlight=False)
    for line in warnings(policies, manifest):
        console.print(Text(line, style="bold red"))
    if sentence := answer(policies):
        console.print(Text(sentence, style="bold"))
    for name, value in setting(manifest):
        console.print(Text(f"{name}: ", style="dim") + Text(value, style="yellow" if "not measured" in value else ""))
    if policies:
        rows = compare(policies)
        console.print(_metrics_down(names, rows) if fits else _policies_down(names, rows, console.width))
    for note in notes(manifest):
        console.print(Text(f"Note: {note}", style="dim"))


def _metrics_down(names: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("unit", style="dim")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for i, row in enumerate(rows):
        ends_group = i + 1 < len(rows) and rows[i + 1].group != row.group
        table.add_row(Text(row.label), row.unit, *_cells(row), end_section=ends_group)
    return table


def _policies_down(names: Sequence[str], rows: Sequence[Row], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    shown, left = [], width - max(map(len, names)) - 2
    for row in rows:
        # As many of the numbers that matter most as the terminal holds.
        needs = max(len(text) for text in (row.label, row.unit, *row.cells)) + 3
        if row.brief and needs <= left:
            shown.append(_cells(row))
            left -= needs
            table.add_column(Text(f"{row.label}\n{row.unit}"), justify="right", no_wrap=True)
    for i, name in enumerate(names):
        table.add_row(Text(name), *(cells[i] for cells in shown))
    return table


def _cells(row: Row) -> list[Text]:
    return [Text(cell, style="bold green" if i in row.best else "") for i, cell in enumerate(row.cells)]
