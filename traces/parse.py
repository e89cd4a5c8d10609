"""Rows to numbers, one by one, to name the bad one."""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..engine.errors import TraceError
from ..files.read import json_of
from .formats import MEASURED, TICKS_PER_SECOND, Format
from .rows import Row, Rows
from .trace import MAX_LENGTH, Floats, Ints

Ticks: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]

MAX_WHOLE = 2**31 - 1
MAX_TICK = 2**62  # ns: year 2116
# Counts of at least 1.
COUNTS = (
    "block_size", "gen_length", "block_length", "steps", "diffusion_max_steps", "diffusion_canvas_length", "max_tokens",
    "estimated_length",
)  # fmt: skip
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FRACTION = re.compile(r"\d[.,](\d+)", re.ASCII)
BYTES_PER_TOKEN = 4  # rule of thumb for English


@dataclass(slots=True)
class Columns:
    """Before sorting and shifting; times in the format's unit, as integers if possible."""

    time: Ticks
    input_length: Ints
    output_length: Ints
    extras: dict[str, list[Any]] = field(default_factory=dict)
    # Ticks from arrival to first token and end, under MEASURED's keys; NaN: unknown.
    waited: dict[str, Floats] = field(default_factory=dict)
    num_rows: int = 0
    num_skipped: int = 0
    warnings: list[str] = field(default_factory=list)


class BadRowError(Exception):
    """Key, value and what was expected."""


def columns_of_rows(found: Rows, form: Format, skip_bad: bool) -> Columns:
    """One by one; a bad row raises TraceError, or is left out and counted."""
    time: list[int | float] = []
    input_length: list[int] = []
    output_length: list[int] = []
    names = {ours: theirs for theirs, ours in form.kept}
    waited: dict[str, list[float]] = {name: [] for name in MEASURED}
    extras: dict[str, list[Any]] = {ours: [] for ours in names}
    last: dict[Any, int | float] = {}  # session -> latest turn
    num_skipped = num_text = num_delayed = 0
    for i, row in enumerate(found.rows):
        try:
            if isinstance(row, str):
                raise BadRowError(row)
            tick, delayed = read_time(row, form, last)
            text = row.get(form.text) if form.text and row.get(form.input) is None else None
            from_text = isinstance(text, str)
            num_input = num_tokens(text) if isinstance(text, str) else read_count(form.input, row.get(form.input), 0)
            num_output = read_count(form.output, row.get(form.output), 0)
            if num_input < 1 and num_output > 0:
                raise BadRowError(f"{form.input} is {num_input}, expected at least 1")
            values = {ours: read_extra(ours, row.get(theirs)) for ours, theirs in names.items()}
            waits = read_waits(row, form, tick, num_output)
        except BadRowError as complaint:
            if not skip_bad:
                # A column name may hold a line break.
                line = " ".join(str(complaint).split())
                raise TraceError(f"{found.place(i)}: {line} (--skip-bad leaves bad rows out)") from complaint
            num_skipped += 1
            continue
        num_text += from_text
        num_delayed += delayed
        time.append(tick)
        input_length.append(num_input)
        output_length.append(num_output)
        for ours, value in values.items():
            extras[ours].append(value)
        for name, wait in zip(MEASURED, waits, strict=True):
            waited[name].append(wait)
        if (session := session_of(row)) is not None:
            last[session] = tick
    lengths = np.array(input_length, np.int64), np.array(output_length, np.int64)
    waits_known = {name: np.array(column) for name, column in waited.items()} if form.end else {}
    columns = Columns(np.array(time), *lengths, filled(extras), waits_known, len(found.rows), num_skipped)
    if num_text:
        columns.warnings.append(
            f"{num_text} rows have a text in place of an input length: counted as {BYTES_PER_TOKEN} bytes a token"
        )
    if num_delayed:
        columns.warnings.append(
            f"{num_delayed} rows have a delay in place of a time: they arrive that long after their session's last turn"
        )
    return columns


def is_missing(value: Any) -> bool:
    """An empty cell."""
    return value is None or value == "" or value != value


def read_waits(row: Row, form: Format, arrival: int | float, num_output: int) -> tuple[float, float]:
    """Ticks from arrival to first token and end; NaN if unknown."""
    if not (form.first or form.end):
        return math.nan, math.nan
    first, end = (
        math.nan if not key or is_missing(row.get(key)) else read_moment(row, form, key) - arrival
        for key in (form.first, form.end)
    )
    if form.wait and not is_missing(row.get(form.wait)):
        first = TICKS_PER_SECOND[form.unit] * read_number(form.wait, row[form.wait], 0)
    if num_output == 0:  # no answer
        return math.nan, math.nan
    if first < 0 or end < 0 or first > end:
        ticks = TICKS_PER_SECOND["ns" if form.unit == "datetime" else form.unit]
        moments = " and ".join(
            f"{key} is {wait / ticks:g} s"
            for key, wait in ((form.wait or form.first, first), (form.end, end))
            if wait == wait
        )
        raise BadRowError(f"{moments} after {form.time}, expected the first token from there on and the end after it")
    return (math.nan if first == end and num_output > 1 else first), end


def num_tokens(text: str) -> int:
    """Estimated, of a text."""
    return max(1, math.ceil(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN))


def ns_of(stamp: Any) -> int:
    """ns since 1970 of an ISO date, which is in UTC without a time zone; ValueError."""
    if not isinstance(stamp, str):
        raise ValueError(f"{stamp} is no text")
    date = datetime.fromisoformat(stamp.strip())  # reads six digits of a second
    since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - EPOCH
    digits = FRACTION.search(stamp)
    return (since.days * 86_400 + since.seconds) * 10**9 + int(f"{digits[1][:9]:0<9}" if digits else 0)


def read_time(row: Row, form: Format, last: dict[Any, int | float]) -> tuple[int | float, bool]:
    """Arrival in ticks; whether it is a delay after the session's last turn."""
    value = row.get(form.time)
    if value in (None, "") and row.get("delay") is not None and (session := session_of(row)) in last:
        delay = read_number("delay", row["delay"], 0) * TICKS_PER_SECOND[form.unit] / 1e3
        return read_number(form.time, last[session] + delay, 0), True
    return read_moment(row, form, form.time), False


def read_moment(row: Row, form: Format, key: str) -> int | float:
    """In the format's unit; dates in ns."""
    value = row.get(key)
    if form.unit != "datetime":
        return read_number(key, value, 0)
    try:
        tick = ns_of(value)
    except ValueError as error:
        raise BadRowError(f"{key} is {shown(value)}, expected a date and time") from error
    if not 0 <= tick <= MAX_TICK:
        raise BadRowError(f"{key} is {shown(value)}, expected a date and time from 1970 to 2116")
    return tick


def session_of(row: Row) -> str | int | None:
    """None if missing or invalid."""
    session = row.get("session_id")
    return session if isinstance(session, str | int) else None


def read_count(key: str, value: Any, least: int) -> int:
    return read_whole(key, value, least, MAX_LENGTH)


def read_whole(key: str, value: Any, least: int = -MAX_WHOLE, most: int = MAX_WHOLE) -> int:
    number = read_number(key, value, least, most)
    if number % 1 != 0:
        raise BadRowError(f"{key} is {shown(value)}, expected a whole number")
    return int(number)


def read_number(key: str, value: Any, least: int, most: int = MAX_TICK) -> int | float:
    """From a number or text."""
    if value is None or value == "":
        raise BadRowError(f"{key} is missing, expected a number of at least {least}")
    number = value
    if isinstance(value, str) and "_" not in value:
        for kind in (int, float):
            with suppress(ValueError):
                number = kind(value)
                break
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise BadRowError(f"{key} is {shown(value)}, expected a number of at least {least}")
    if not least <= number <= most:
        top = "a finite number" if number != number or number == math.inf else f"at most {most}"
        limit = f"at least {least}" if number < least else top
        raise BadRowError(f"{key} is {shown(value)}, expected {limit}")
    return number


def filled(extras: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns with a value."""
    return {name: column for name, column in extras.items() if any(value is not None for value in column)}


def read_extra(name: str, value: Any) -> Any:
    """None if missing."""
    if value is None or value == "":
        return None
    return CHECKED[name](name, value) if name in CHECKED else value


def read_flag(key: str, value: Any) -> bool:
    """Also as text."""
    found = {"true": True, "false": False}.get(str(value).lower())
    if found is None:
        raise BadRowError(f"{key} is {shown(value)}, expected true or false")
    return found


def read_hash_ids(key: str, value: Any) -> list[Any]:
    """A prompt's block ids, also as JSON text."""
    found = value
    if isinstance(value, str):
        with suppress(ValueError):
            found = json_of(value)
    if not isinstance(found, list):
        raise BadRowError(f"{key} is {shown(value)}, expected a list")
    return found


def shown(value: Any) -> str:
    """One line of at most 40 characters."""
    text = json.dumps(value, default=str) if isinstance(value, str | list | dict | bool) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Readers of checked optional columns.
CHECKED: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(COUNTS, partial(read_count, least=1)),
    **dict.fromkeys(("delay", "deadline"), partial(read_number, least=0)),
    "priority": read_whole,
    "diffusion_read_only": read_flag,
    **dict.fromkeys(MEASURED.values(), lambda key, value: float(read_number(key, value, 0))),
    "hash_ids": read_hash_ids,
}
