"""A page: the answer, its warnings and the sections behind it. html.py and text.py render it for their readers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .chart import Chart

ESTIMATED = "Estimated, not measured."


@dataclass(frozen=True)
class Figure:
    """A chart with its title and what to read in it. `time`: its x axis is the run's, and zooms with the others."""

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    caption: str
    chart: Chart
    time: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table: the first cell is its head."""

    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()  # cells that win
    group: str = ""  # rows of one group stand together under its name
    about: str = ""  # what the number means
    failed: bool = False  # the last cell says why there are no others


@dataclass(frozen=True)
class Table:
    """A table. In a terminal as wide as it needs to be, in a page it scrolls."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    caption: str = ""
    left: frozenset[int] = frozenset({0})  # columns that hold words: they are set to the left, and may wrap
    coloured: int | None = None  # the first column that has a policy's colour, and so have the next
    fold: bool = False
    spare: tuple[str, ...] = ()  # columns that go first where a terminal is too narrow
    turned: "Table | None" = None  # the same with columns as rows, for a terminal that is narrower still


@dataclass(frozen=True)
class Words:
    """Sentences. `loud`: a terminal says them as loudly as anything."""

    kind: ClassVar[str] = "words"
    lines: tuple[str, ...]
    loud: bool = False


@dataclass(frozen=True)
class Code:
    """Lines to paste into a terminal or a file. A terminal shows each after `indent`."""

    kind: ClassVar[str] = "code"
    lines: tuple[str, ...]
    indent: str = "  "


@dataclass(frozen=True)
class Widget:
    """A part of a page that its script fills from the page's data: `requests` or `moment`."""

    kind: ClassVar[str] = "widget"
    name: str
    title: str
    caption: str


Block = Figure | Table | Words | Code | Widget


@dataclass(frozen=True)
class Section:
    """Blocks under a title. `spoken`: a terminal says the title."""

    title: str
    blocks: tuple[Block, ...]
    spoken: bool = False
    fold: str = ""  # what a reader clicks on to see the section


@dataclass(frozen=True)
class Number:
    """One of the few numbers that matter, for each policy or one."""

    label: str
    values: tuple[tuple[int | None, str], ...]  # (the policy whose colour it has, the number with its unit)
    about: str = ""


@dataclass(frozen=True)
class Page:
    """A command's findings, in the order in which they are to be read."""

    name: str  # of the page, in a browser's tab
    question: str
    answer: str = ""
    verdict: str = ""  # beneath the answer: how it compares with what was measured
    alarms: tuple[str, ...] = ()  # words in capitals come first, and are loud
    cautions: tuple[tuple[str, str], ...] = ()  # (what, why)
    numbers: tuple[Number, ...] = ()
    chart: Figure | None = None  # the one that shows the answer
    facts: tuple[tuple[str, str], ...] = ()
    policies: tuple[str, ...] = ()  # a legend, one colour each
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    version: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # of the widgets

    @property
    def figures(self) -> list[Figure]:
        """Every figure, in order."""
        first = [] if self.chart is None else [self.chart]
        return first + [b for section in self.sections for b in section.blocks if isinstance(b, Figure)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], **how: Any) -> Table:
    """A table of plain cells."""
    return Table(tuple(head), tuple(Row(tuple(cells)) for cells in rows), **how)


def estimate(profile: str, of: str = "policies") -> tuple[str, str]:
    """The caution about a profile that was derived."""
    why = f"The profile {profile} was not measured on this device: trust the order of {of} more than the numbers."
    return ESTIMATED, why
