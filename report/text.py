"""A page as text: coloured on a terminal, plain in a pipe."""

from collections.abc import Iterable
from itertools import zip_longest

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from ..files.read import printable
from .page import Code, Page, Table, Words

UNTRUE = "not measured"  # highlights facts


class Terminal(Console):
    """Escapes the control characters of texts; rich's own codes stay."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls it where it caught the error, and would end with 1

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                segment = segment._replace(text=printable(segment.text))
            yield segment


def render(page: Page, console: Console) -> None:
    """In a pipe with unlimited width."""
    if not console.is_terminal:
        console = Terminal(file=console.file, width=10_000, color_system=None, highlight=False)
    for line in page.alarms:
        console.print(Text(line, style="bold red"))
    if page.answer:
        console.print(Text(page.answer, style="bold"))
    for line in page.details:
        console.print(Text(line))
    for name, value in page.facts:
        style = "yellow" * (UNTRUE in value)
        console.print(Text(f"{name}: ", style="dim") + Text(value, style=style))
    for section in page.sections:
        if section.fold:
            continue
        if section.spoken:
            console.print(Text(f"\n{section.title}", style="bold"))
        for block in section.blocks:
            if isinstance(block, Table):
                console.print(grid(block))
            elif isinstance(block, Words):
                for line in block.lines:
                    console.print(Text(line, style="dim" * (not block.loud)))
            elif isinstance(block, Code):
                for line in block.lines:
                    console.print(Text(block.indent + line))
    for note in page.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def grid(table: Table) -> Grid:
    view = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(table.head):
        view.add_column(Text(head), justify="right", overflow="fold")
        if i in table.left:
            view.columns[i].justify = "left"
    for row, after in zip_longest(table.rows, table.rows[1:]):
        cells = [Text(cell, style="bold green" * (i in row.best)) for i, cell in enumerate(row.cells)]
        view.add_row(*cells, end_section=after is not None and after.group != row.group)
    return view
