"""A comparison on a terminal: warnings first, then policy by policy."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import words
from .comparison import Comparison

# Left out first where a terminal is too narrow.
SPARE = ("KS", "p90 error", "p95 error", "p50 error", "p99 error")


def render(found: Comparison, console: Console) -> None:
    """Print it; in a pipe as plain text, as wide as it needs to be."""
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000, color_system=None, highlight=False)
    for line in words.warnings(found):
        console.print(Text(line, style="bold red"))
    console.print(Text(words.answer(found), style="bold"))
    for i, pair in enumerate(found.pairs):
        which = f" {i + 1}" if len(found.pairs) > 1 else ""
        for head, side in zip(words.heads(pair), pair, strict=True):
            console.print(Text(f"{head.capitalize()}{which}: ", style="dim") + Text(words.about(side)))
    for cell in found.cells:
        console.print(Text(f"\n{cell.name}", style="bold"))
        console.print(_table(words.error_table(found, cell), console))
        if not cell.unpaired:
            console.print(_table(words.request_table(cell), console))
        console.print(_table(words.totals_table(found, cell), console))
        console.print(Text(words.left_out_line(cell), style="dim"))
        for line in words.step_lines(found, cell):
            console.print(Text(line, style="dim"))
        if cell.parts is not None:
            console.print(Text("The error of each mean, and its parts as shares of the second run's mean"))
            console.print(_table(words.parts_table(found, cell), console))
        for line in words.part_lines(cell):
            console.print(Text(line, style="dim"))
    for ranking in found.rankings:
        console.print(Text(f"\nRanking of {', '.join(ranking.cells)}", style="bold"))
        console.print(_table(words.ranking_table(found, ranking), console))
    for line in [*found.notes, *words.definition_lines()]:
        console.print(Text(f"Note: {line}", style="dim"))


def _table(table: words.Table, console: Console) -> Table:
    head, rows = table
    keep = list(range(len(head)))
    for name in SPARE:
        if sum(max(len(row[i]) for row in [head, *rows]) + 2 for i in keep) <= console.width:
            break
        keep = [i for i in keep if head[i] != name]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i in keep:
        shown.add_column(Text(head[i]), justify="left" if i == 0 or head[i] == "unit" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(Text(row[i]) for i in keep))
    return shown
