"""Other tools' trace formats: their keys (formats.toml)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine.errors import TraceError
from ..files.read import cut, did_you_mean, float_of, quoted, read_toml
from .rows import Rows

TICKS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

TABLES = read_toml(Path(__file__).with_suffix(".toml"))
OPTIONAL: tuple[str, ...] = tuple(TABLES["optional"])  # columns of the canonical file
NAMED: tuple[str, ...] = tuple(TABLES["named"])  # for `--columns`; the first three are required
MEASURED: dict[str, Any] = {"ttft": "measured_ttft", "e2el": "measured_e2el"}  # s that a client waited


@dataclass(frozen=True, slots=True)
class Format:
    """A tool's keys, "" if missing; `a or b`: the first that the row has. extras: its optional key -> our name; other
    keys are ignored."""

    name: str
    time: str
    input: str
    output: str
    unit: str  # s, ms, us, ns or datetime
    extras: dict[str, str] = field(default_factory=dict)
    doubtful: bool = False  # tools disagree on the unit of `time`
    first: str = ""  # first token's time, in the unit of `time`
    end: str = ""  # last token's time
    ttft: str = ""  # time to the first token, instead of `first`
    e2el: str = ""  # ... to the last one, instead of `end`
    decode: str = ""  # first to last token, instead of `e2el` if the file has it; an answer of one chunk has none
    wait_unit: str = "s"  # of these three
    is_log: bool = False  # a team's log: several models, embeddings, failures, cached answers
    report: bool = False  # a load generator's requests, which may lack counts

    @property
    def keys(self) -> str:
        """The required keys, for errors."""
        return f"{self.time}, {self.input}, {self.output}"

    def matches(self, keys: Iterable[str]) -> bool:
        """Whether the keys include the required ones."""
        have = set(keys) - {""}
        return all(have & {*name.split(" or ")} for name in (self.time, self.output, self.input))

    def columns_of(self, rows: Rows) -> dict[str, str]:
        """The tool's key of each optional column that a row may have, by our name."""
        return {ours: key for key, ours in self.extras.items() if rows.has(key)}

    @property
    def ticks(self) -> float:
        """Per second."""
        return TICKS_PER_SECOND["ns" if self.unit == "datetime" else self.unit]


CANONICAL = {key: key for key in OPTIONAL if key not in MEASURED.values()}
OF_RUN = "policy"  # a run's policy, in its requests


def _format(name: str, fields: dict[str, Any]) -> Format:
    if fields.pop("canonical", False):
        fields = fields | MEASURED | {"extras": CANONICAL | fields.get("extras", {})}
    return Format(name, **fields)


FORMATS, OTHER_FORMATS = (
    {name: _format(name, fields) for name, fields in TABLES[group].items()} for group in ("traces", "others")
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`load`'s arguments that select format and rows."""

    columns: str | None = None
    only: str | None = None
    skip_bad: bool = False
    time_unit: str | None = None


def recognise(rows: Rows) -> Format:
    """The format of the rows' keys; an error lists all formats' keys."""
    for candidate in FORMATS.values():
        if candidate.matches(rows.keys):
            return candidate
    formats = "; ".join(f"{f.name} ({f.keys})" for f in FORMATS.values())
    problem = f"keys {shown_keys(rows.keys)} are of no known trace"
    columns = "or --columns arrival=COLUMN,input=COLUMN,output=COLUMN"
    results = "`dsim import` reads a load generator's results"
    raise TraceError(f"{rows.head()}: {problem}, expected one of: {formats}; {columns}; {results}")


def own_format(rows: Rows, text: str) -> Format:
    """Of `--columns arrival=A,input=I,output=O`; a time that is no number is a date."""
    pairs = [[side.strip() for side in item.partition("=")[::2]] for item in text.split(",")]
    columns: dict[str, str] = dict(pairs)
    if len(columns) < len(pairs) or not set(NAMED[:3]) <= set(columns) <= set(NAMED) or not all(columns.values()):
        raise TraceError(
            f"--columns is {quoted(text)}, expected arrival=COLUMN,input=COLUMN,output=COLUMN and, where there are, "
            f"{', '.join(NAMED[3:])}"
        )
    for ours, column in columns.items():
        check_column(rows, column, f"--columns {ours}={cut(column)}")
    time, num_input, num_output = (columns.pop(ours) for ours in NAMED[:3])
    first, end = (columns.pop(ours, "") for ours in ("first", "end"))
    unit = {True: "s", False: "datetime"}[is_number(rows.first(time))]
    extras = {column: ours for ours, column in columns.items()}
    form = Format("own columns", time, num_input, num_output, unit=unit, extras=extras, first=first, end=end)
    return replace(form, doubtful=unit == "s", is_log=True)


def is_number(value: object) -> bool:
    """Also text of a number, or empty."""
    if not isinstance(value, str):
        return value is None or isinstance(value, int | float)
    return value == "" or math.isfinite(float_of(value))


def check_column(rows: Rows, column: str, option: str) -> None:
    """TraceError if no row has it."""
    if column not in rows.keys and rows.first(column) is None:
        hint = did_you_mean(column, (key for key in rows.keys if len(key) <= 40))
        expected = f"expected one of: {shown_keys(rows.keys)}"
        raise TraceError(f"{rows.head()}: no column {cut(column)} ({option}){hint}, {expected}")


def shown_keys(keys: list[str]) -> str:
    """One line of at most 80 characters."""
    text = " ".join(", ".join(keys).split())
    return text if len(text) <= 80 else text[:77] + "..."
