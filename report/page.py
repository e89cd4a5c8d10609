"""A page: answer, warnings, sections; html.py and text.py render it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # it loads NumPy
    from .chart import Chart

ESTIMATED = "Estimated, not measured."


@dataclass(frozen=True)
class Figure:
    """time: x is the run's time and zooms with other such charts."""

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    caption: str
    chart: "Chart"
    time: bool = False


@dataclass(frozen=True)
class Row:
    """The first cell is its head."""

    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()  # cells
    group: str = ""  # adjacent rows share its heading
    about: str = ""  # the number's formula
    failed: bool = False  # the last cell is an error


@dataclass(frozen=True)
class Table:
    """Scrolls in a browser if wide."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    caption: str = ""
    left: frozenset[int] = frozenset({0})  # text columns, wrapped
    coloured: int | None = None  # first column in policies' colours


@dataclass(frozen=True)
class Words:
    kind: ClassVar[str] = "words"
    lines: tuple[str, ...]
    loud: bool = False


@dataclass(frozen=True)
class Code:
    """Lines to copy; `indent`: on a terminal."""

    kind: ClassVar[str] = "code"
    lines: tuple[str, ...]
    indent: str = "  "


Block = Figure | Table | Words | Code


@dataclass(frozen=True)
class Section:
    """spoken: a terminal shows the title. fold: it is collapsed in a browser, and not on a terminal."""

    title: str
    blocks: tuple[Block, ...]
    spoken: bool = False
    fold: bool = False


@dataclass(frozen=True)
class Number:
    label: str
    values: tuple[tuple[int | None, str], ...]  # (policy's index or None, number with unit)
    about: str = ""


@dataclass(frozen=True)
class Page:
    """Findings in reading order."""

    name: str  # of the browser's tab
    question: str
    answer: str = ""
    details: tuple[str, ...] = ()  # of the answer
    alarms: tuple[str, ...] = ()  # begin in capitals
    cautions: tuple[tuple[str, str], ...] = ()  # (what, why)
    numbers: tuple[Number, ...] = ()
    chart: Figure | None = None  # shows the answer
    facts: tuple[tuple[str, str], ...] = ()
    policies: tuple[str, ...] = ()  # a legend, in colours
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    version: str = ""

    @property
    def figures(self) -> list[Figure]:
        blocks = [self.chart, *(block for section in self.sections for block in section.blocks)]
        return [block for block in blocks if isinstance(block, Figure)]


def facts_of(facts: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Without empty texts."""
    return tuple((name, text) for name, text in facts.items() if text)


def numbers(rows: Sequence[tuple[str, str, str]], limit: int = 4) -> tuple[Number, ...]:
    """The first ones. rows: label, number with unit, what it is about."""
    return tuple(Number(label, ((None, text),), about) for label, text, about in rows[:limit])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> Table:
    return Table(tuple(head), tuple(Row(tuple(cells)) for cells in rows), **options)


def table_of(rows: Sequence[Mapping[str, str]], caption: str, texts: Collection[str]) -> Table:
    """Rows by column, without empty columns. texts: columns of text."""
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    columns = frozenset(i for i, name in enumerate(head) if name in texts)
    return table(head, [[row[name] for name in head] for row in rows], caption=caption, left=columns)


def priced_apart(implementations: Iterable[str]) -> str:
    """Ends a comparison's first sentence if the steps compared are not priced by one implementation."""
    names = list(dict.fromkeys(implementations))
    if len(names) < 2:
        return ""
    return f"; steps are priced by different implementations ({' and '.join(names)})"


def estimate(profile: str, order: str = "policies") -> tuple[str, str]:
    reason = f"No device ran the steps of {profile}: trust the order of {order} more than the numbers."
    return ESTIMATED, reason
