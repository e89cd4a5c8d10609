"""A page: an answer, its warnings and its sections. html.py and text.py render it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .chart import Chart

ESTIMATED = "Estimated, not measured."


@dataclass(frozen=True)
class Figure:
    """A chart with title and caption. time: x is the run's time and zooms together with other such charts."""

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    caption: str
    chart: Chart
    time: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table; the first cell is its head."""

    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()  # cells with the best value
    group: str = ""  # adjacent rows of a group share a heading
    about: str = ""  # formula of the number
    failed: bool = False  # the last cell is an error message


@dataclass(frozen=True)
class Table:
    """A table; in a browser a wide one scrolls."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    caption: str = ""
    left: frozenset[int] = frozenset({0})  # columns of text, left-aligned and wrapped
    coloured: int | None = None  # first of the columns in policies' colours
    fold: bool = False
    spare: tuple[str, ...] = ()  # columns that a narrow terminal omits, in this order
    turned: "Table | None" = None  # the transposed table, for a narrow terminal


@dataclass(frozen=True)
class Words:
    kind: ClassVar[str] = "words"
    lines: tuple[str, ...]
    loud: bool = False


@dataclass(frozen=True)
class Code:
    """Lines to copy; a terminal indents them by `indent`."""

    kind: ClassVar[str] = "code"
    lines: tuple[str, ...]
    indent: str = "  "


@dataclass(frozen=True)
class Widget:
    """A part that the page's script fills from its data: `requests` or `moment`."""

    kind: ClassVar[str] = "widget"
    name: str
    title: str
    caption: str


Block = Figure | Table | Words | Code | Widget


@dataclass(frozen=True)
class Section:
    """Blocks under a title. spoken: a terminal shows the title."""

    title: str
    blocks: tuple[Block, ...]
    spoken: bool = False
    fold: str = ""  # the title of a collapsed section


@dataclass(frozen=True)
class Number:
    label: str
    values: tuple[tuple[int | None, str], ...]  # (index of a policy or None, number with unit)
    about: str = ""


@dataclass(frozen=True)
class Page:
    """A command's findings, in reading order."""

    name: str  # in the browser's tab
    question: str
    answer: str = ""
    verdict: str = ""  # below the answer: comparison with measured times
    alarms: tuple[str, ...] = ()  # each starts with words in capitals
    cautions: tuple[tuple[str, str], ...] = ()  # (what, why)
    numbers: tuple[Number, ...] = ()
    chart: Figure | None = None  # the figure that shows the answer
    facts: tuple[tuple[str, str], ...] = ()
    policies: tuple[str, ...] = ()  # a legend, one colour each
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    version: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # for the widgets

    @property
    def figures(self) -> list[Figure]:
        first = [] if self.chart is None else [self.chart]
        return first + [b for section in self.sections for b in section.blocks if isinstance(b, Figure)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], **how: Any) -> Table:
    return Table(tuple(head), tuple(Row(tuple(cells)) for cells in rows), **how)


def estimate(profile: str, of: str = "policies") -> tuple[str, str]:
    """The caution about an estimated profile."""
    why = f"The profile {profile} was not measured on this device: trust the order of {of} more than the numbers."
    return ESTIMATED, why
