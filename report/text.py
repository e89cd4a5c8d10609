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
            yield segment if segment.control else segment._replace(text=printable(segment.text))


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
        console.print(Text(f"{name}: ", style="dim") + Text(value, style="yellow" if UNTRUE in value else ""))
    for section in page.sections:
        if section.spoken:
            console.print(Text(f"\n{section.title}", style="bold"))
        for block in section.blocks:
            if isinstance(block, Table) and not block.fold:
                console.print(grid(block, console))
            elif isinstance(block, Words):
                for line in block.lines:
                    console.print(Text(line, style="" if block.loud else "dim"))
            elif isinstance(block, Code):
                for line in block.lines:
                    console.print(Text(block.indent + line))
    for note in page.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def grid(table: Table, console: Console) -> Grid:
    """If too wide, transposed or without spare columns."""
    if table.turned is not None and _width(table, range(len(table.head))) > console.width:
        table = table.turned
    keep = list(range(len(table.head)))
    for name in table.spare:
        if _width(table, keep) <= console.width:
            break
        keep = [i for i in keep if table.head[i] != name]
    view = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for i in keep:
        view.add_column(Text(table.head[i]), justify="left" if i in table.left else "right", no_wrap=True)
    for row, after in zip_longest(table.rows, table.rows[1:]):
        cells = (Text(row.cells[i], style="bold green" if i in row.best else "") for i in keep)
        view.add_row(*cells, end_section=after is not None and after.group != row.group)
    return view


def _width(table: Table, columns: "range | list[int]") -> int:
    lines = [table.head, *(row.cells for row in table.rows)]
    return sum(max(len(text) for line in lines for text in line[i].split("\n")) + 3 for i in columns)
