"""Rows to numbers, one by one, to name the bad one."""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ..engine.errors import TraceError
from ..files.read import json_of, shown
from .chosen import OF_LOG, chosen, failures
from .formats import MEASURED, TICKS_PER_SECOND, Format, ReadOptions, is_number
from .rows import Rows, is_missing
from .trace import MAX_LENGTH, Bools, Floats, Ints

Ticks: TypeAlias = Ints | Floats

Reader: TypeAlias = Callable[[str, Any], Any]  # of a key and its value

MAX_WHOLE = 2**31 - 1
MAX_TICK = 2**62  # ns: year 2116
# Counts of at least 1.
COUNTS = ("block_size", "gen_length", "block_length", "steps", "diffusion_max_steps", "max_tokens", "estimated_length")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST_WAIT = 1e6  # s: a time in another unit
EXAMPLE = "2026-03-01T10:00:00Z"
PLAUSIBLE_RATES = (0.01, 1000.0)  # req/s; others suggest another time unit
FRACTION = re.compile(r"\d[.,](\d+)", re.ASCII)


@dataclass(slots=True)
class Columns:
    """Before sorting and shifting; times in the format's unit, as integers if possible."""

    time: Ticks
    input_length: Ints
    output_length: Ints
    extras: dict[str, list[Any]] = field(default_factory=dict)
    # s from arrival to first token and end, under MEASURED's keys; NaN: unknown.
    waited: dict[str, Floats] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # of failures; "": answered
    num_rows: int = 0
    num_skipped: int = 0
    warnings: list[str] = field(default_factory=list)

    def take(self, index: list[int]) -> "Columns":
        """These requests in this order."""
        return replace(
            self,
            **{name: getattr(self, name)[index] for name in ("time", "input_length", "output_length")},
            extras={name: [column[i] for i in index] for name, column in self.extras.items()},
            waited={name: column[index] for name, column in self.waited.items()},
            reasons=[self.reasons[i] for i in index],
        )


class BadRowError(Exception):
    """Key, value and what was expected."""


@dataclass(slots=True)
class Cells:
    """Reads columns, and holds the bad rows' complaints."""

    rows: Rows
    bad: dict[int, str]

    def column(self, key: str, read: Reader, values: list[Any] | None = None) -> list[Any]:
        """Each value as read; 0 in place of a bad one."""
        if values is None:
            values = self.rows.values(key)
        quick = quick_numbers(values, **read.keywords) if isinstance(read, partial) else None
        return quick or self._read(key, read, dict(enumerate(values)), [0] * len(values))

    def optional(self, key: str, read: Reader, empty: Any) -> list[Any]:
        """Each value as read; `empty` in place of a missing one."""
        cells = self.rows.values(key) if key else []
        present = {i: value for i, value in enumerate(cells) if not is_missing(value)}
        return self._read(key, read, present, [empty] * len(self.rows.rows))

    def _read(self, key: str, read: Reader, cells: dict[int, Any], results: list[Any]) -> list[Any]:
        """The results with these cells as read."""
        for i, value in cells.items():
            try:
                results[i] = read(key, value)
            except BadRowError as complaint:
                self.bad.setdefault(i, str(complaint))
        return results

    def complain(self, wrong: Bools, complaint: Callable[[int], str]) -> None:
        for i in np.flatnonzero(wrong).tolist():
            self.bad.setdefault(i, complaint(i))


def columns_of_rows(rows: Rows, form: Format, options: ReadOptions) -> tuple[Columns, Format]:
    """A bad row raises TraceError, or is left out and counted. The format has the unit of the times."""
    rows, warnings = chosen(rows, form, options.only)
    form = with_unit(rows, form, options)
    reasons = failures(rows, form)
    answered = np.array([not reason for reason in reasons])
    cells = Cells(rows, dict(rows.bad))
    read_time: Reader = read_date if form.unit == "datetime" else TICK
    time = cells.column(form.time, read_time)
    num_input, num_output = lengths(cells, form, answered)
    extras = {}
    for ours, key in form.columns_of(rows).items():
        if ours not in OF_LOG:
            values = cells.optional(key, CHECKED.get(ours, as_it_is), None)
            if values.count(None) < len(values):
                extras[ours] = values
    if not form.report:
        answered &= num_output > 0
    waited = waits(cells, form, time, read_time, answered, num_output)
    if "gaps" in extras and waited:  # of an end that is unknown
        for i in np.flatnonzero(np.isnan(waited["e2el"])).tolist():
            if extras["gaps"][i] is not None:
                waited["e2el"][i] = waited["ttft"][i] + sum(extras["gaps"][i]) / TICKS_PER_SECOND[form.wait_unit]
    bad = cells.bad
    if bad and not options.skip_bad:
        i = min(bad)
        line = " ".join(bad[i].split())  # a column name may hold a line break
        raise TraceError(f"{rows.place(i)}: {line} (--skip-bad leaves bad rows out)")
    ticks = np.array(time)
    doubt(ticks, form, warnings)
    columns = Columns(
        time=ticks,
        input_length=num_input,
        output_length=num_output,
        extras=extras,
        waited=waited,
        reasons=reasons,
        num_rows=len(time),
        num_skipped=len(bad),
        warnings=[*rows.warnings, *warnings],
    )
    if bad:
        columns = columns.take([i for i in range(len(time)) if i not in bad])
    return columns, form


def lengths(cells: Cells, form: Format, answered: Bools) -> tuple[Ints, Ints]:
    """Input and output tokens. A failed request has no output, and its counts may be missing."""
    columns = []
    for key in (form.input, form.output):
        values = cells.rows.values(key)
        for i, value in enumerate(values):
            if form.report and is_missing(value):
                values[i] = 0
            elif not answered[i]:
                values[i] = (quick_numbers([value], **COUNT.keywords) or [0])[0]
        columns.append(np.array(cells.column(key, COUNT, values), np.int64))
    num_input, num_output = columns
    num_output[~answered] = 0
    if not form.report:
        cells.complain(
            (num_input < 1) & (num_output > 0), lambda i: f"{form.input} is {num_input[i]}, expected at least 1"
        )
    return num_input, num_output


def with_unit(table: Rows, form: Format, options: ReadOptions) -> Format:
    """The asked unit; of dates nanoseconds."""
    if not is_number(date := table.first(form.time)):
        with suppress(ValueError):
            ns_of(date)
            form = replace(form, unit="datetime", doubtful=False)
    if options.time_unit is not None:
        if form.unit == "datetime":
            problem = f"{form.time} is a date and time, expected no --time-unit (it is {options.time_unit})"
            raise TraceError(f"{table.path}: {problem}")
        return replace(form, unit=options.time_unit, doubtful=False)
    return replace(form, doubtful=form.doubtful and form.unit in ("s", "ms"))


def doubt(time: Ticks, form: Format, warnings: list[str]) -> None:
    """Whether the unit may not be the format's."""
    if form.doubtful and len(time):
        rate = (len(time) - 1) / (float(np.ptp(time)) / form.ticks or 1.0)
        if len(time) > 1 and not PLAUSIBLE_RATES[0] <= rate <= PLAUSIBLE_RATES[1]:
            reading = f"{form.time} read as {form.unit} makes {rate:.3g} req/s"
            warnings.append(f"{reading}: another --time-unit may be meant")


def waits(
    cells: Cells, form: Format, time: list[Any], read_time: Reader, answered: Bools, num_output: Ints
) -> dict[str, Floats]:
    """s from arrival to first token and end; NaN: unknown. Empty if no end is known."""
    if not (form.end or form.e2el):
        return {}
    units = TICKS_PER_SECOND[form.wait_unit]
    since = []
    for moment, wait in ((form.first, form.ttft), (form.end, form.e2el)):
        moments = cells.optional(moment, read_time, math.nan)
        after = np.array([tick - begin for tick, begin in zip(moments, time, strict=True)], np.float64) / form.ticks
        lasting = np.array(cells.optional(wait, TICK, math.nan), np.float64) / units
        since.append(np.where(answered, np.where(np.isnan(after), lasting, after), math.nan))
    first, end = since
    decode = np.array(cells.optional(form.decode, TICK, math.nan), np.float64)
    if np.isfinite(decode).any():
        end = np.where(np.isnan(first), end, first + np.nan_to_num(decode) / units)
    late = first > end + 1e-6  # rounding
    cells.complain(
        (first < 0) | (end < 0) | late | (np.fmax(first, end) > LONGEST_WAIT),
        lambda i: (
            f"{form.ttft or form.first} is {first[i]:g} s and {form.end or form.e2el} {end[i]:g} s after "
            f"{form.time}, expected the first token from there on and the end after it"
        ),
    )
    if form.is_log:  # the gateway did not see the first token
        first[(first == end) & (num_output > 1)] = math.nan
    return dict(zip(MEASURED, (first, end), strict=True))


def ns_of(stamp: Any) -> int:
    """ns since 1970 of an ISO date, which is in UTC without a time zone; ValueError."""
    if not isinstance(stamp, str):
        raise ValueError(f"{stamp} is no text")
    date = datetime.fromisoformat(stamp.strip())  # reads six digits of a second
    since = date.replace(tzinfo=date.tzinfo or UTC) - EPOCH
    digits = FRACTION.search(stamp)
    nanoseconds = int(f"{digits[1][:9]:0<9}") if digits else 0
    return (since.days * 86_400 + since.seconds) * 10**9 + nanoseconds


def read_date(key: str, value: Any) -> int:
    """In ns since 1970."""
    with suppress(ValueError):
        tick = ns_of(value)
        if 0 <= tick <= MAX_TICK:
            return tick
    raise BadRowError(f"{key} is {shown(value)}, expected a date and time from 1970 to 2116 such as {EXAMPLE}")


def read_number(key: str, value: Any, least: int = 0, high: int = MAX_TICK, integer: bool = False) -> Any:
    """From a number or text."""
    number: Any = value
    if isinstance(value, str) and "_" not in value:
        for kind in (float, int):
            with suppress(ValueError):
                number = kind(value)
    is_good = isinstance(number, int | float) and not isinstance(number, bool) and least <= number <= high
    if not is_good or (integer and number % 1):
        text, noun = shown(value), {True: "a whole number", False: "a number"}[integer]
        if is_missing(value):
            text = "missing"
        raise BadRowError(f"{key} is {text}, expected {noun} from {least} to {high}")
    if integer:
        number = int(number)
    return number


def quick_numbers(values: list[Any], least: int = 0, high: int = MAX_TICK, integer: bool = False) -> list[Any] | None:
    """All values as by `read_number`; None if one needs a closer look."""
    kinds = set(map(type, values))
    if kinds == {str} and "_" not in "".join(values):
        for kind in (int, float):
            with suppress(ValueError):
                values = list(map(kind, values))
                break
        kinds = set(map(type, values))
    if not values or not kinds <= {int, float}:
        return None
    with suppress(OverflowError):
        array = np.array(values, np.float64)
        if array.min() >= least and array.max() <= high and not (integer and (array % 1).any()):
            if integer:
                values = list(map(int, values))
            return values
    return None


def read_gaps(key: str, value: Any) -> tuple[float, ...]:
    """Between chunks."""
    return tuple(float(read_number(f"{key}[{i}]", gap)) for i, gap in enumerate(read_list(key, value)))


def read_list(key: str, value: Any) -> list[Any]:
    """Also as JSON text."""
    items = value
    if isinstance(value, str):
        with suppress(ValueError):
            items = json_of(value)
    if not isinstance(items, list):
        raise BadRowError(f"{key} is {shown(value)}, expected a list")
    return items


def as_it_is(key: str, value: Any) -> Any:
    return value


TICK = partial(read_number)
COUNT = partial(read_number, high=MAX_LENGTH, integer=True)
# Readers of checked optional columns.
CHECKED: dict[str, Reader] = {
    **dict.fromkeys(COUNTS, partial(read_number, least=1, high=MAX_LENGTH, integer=True)),
    **dict.fromkeys(("deadline", "due", "chunks"), TICK),
    "priority": partial(read_number, least=-MAX_WHOLE, high=MAX_WHOLE, integer=True),
    "hash_ids": read_list,
    "gaps": read_gaps,
}
