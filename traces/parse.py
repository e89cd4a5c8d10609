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
import numpy.typing as npt

from ..engine.errors import TraceError
from ..files.read import float_of, json_of, shown
from .chosen import OF_LOG, chosen, failures
from .formats import MEASURED, TICKS_PER_SECOND, Asked, Format, is_number
from .rows import Rows, is_missing
from .trace import MAX_LENGTH, Floats, Ints

Ticks: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]

MAX_WHOLE = 2**31 - 1
MAX_TICK = 2**62  # ns: year 2116
# Counts of at least 1.
COUNTS = (
    "block_size", "gen_length", "block_length", "steps", "diffusion_max_steps", "max_tokens",
    "estimated_length",
)  # fmt: skip
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST_WAIT = 1e6  # s: a time in another unit
EXAMPLE = "2026-03-01T10:00:00Z"
PLAUSIBLE_RATES = (0.01, 1000.0)  # req/s; others suggest another time unit
DATES = (946_684_800.0, 4_102_444_800.0)  # s since 1970: 2000 to 2100
ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)\s*$", re.ASCII)
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

    def column(
        self, key: str, read: Callable[[str, Any], Any], optional: bool = False, empty: Any = 0,
        values: list[Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Each value as read; `empty` in place of a bad one, or of a missing one that is optional."""
        if values is None:
            values = self.rows.values(key) if key else [None] * len(self.rows.rows)
        quick = quick_numbers(values, **read.keywords) if isinstance(read, partial) else None
        if quick is not None:
            return quick
        results = []
        for i, value in enumerate(values):
            try:
                results.append(empty if optional and is_missing(value) else read(key, value))
            except BadRowError as complaint:
                self.bad.setdefault(i, str(complaint))
                results.append(empty)
        return results

    def complain(self, wrong: npt.NDArray[np.bool_], complaint: Callable[[int], str]) -> None:
        for i in np.flatnonzero(wrong).tolist():
            self.bad.setdefault(i, complaint(i))


def columns_of_rows(rows: Rows, form: Format, options: Asked) -> tuple[Columns, Format]:
    """A bad row raises TraceError, or is left out and counted. The format has the unit of the times."""
    rows, warnings = chosen(rows, form, options.only)
    form = with_unit(rows, form, options, warnings)
    reasons = failures(rows, form, warnings)
    answered = np.array([not reason for reason in reasons])
    cells = Cells(rows, dict(rows.bad))
    counts = [rows.values(form.input), rows.values(form.output)]
    time = arrivals(cells, form, warnings)
    for i in np.flatnonzero(~answered).tolist():  # its counts may be missing
        counts[0][i], counts[1][i] = (quick_numbers(counts[0][i : i + 1], **COUNT.keywords) or [0])[0], 0
    num_input, num_output = (
        np.array(cells.column(key, COUNT, form.report, values=values), np.int64)
        for key, values in zip((form.input, form.output), counts, strict=True)
    )
    if not form.report:
        cells.complain(
            (num_input < 1) & (num_output > 0), lambda i: f"{form.input} is {num_input[i]}, expected at least 1"
        )
        answered &= num_output > 0
    extras = {}
    for ours, key in form.columns_of(rows).items():
        if ours not in OF_LOG:
            values = [None if is_missing(value) else value for value in rows.values(key)]
            if ours in CHECKED:
                values = cells.column(key, CHECKED[ours], True, None, values)
            if values.count(None) < len(values):
                extras[ours] = values
    waited = waits(cells, form, time, answered, num_output, extras.get("gaps"))
    bad = cells.bad
    if bad and not options.skip_bad:
        i = min(bad)
        line = " ".join(bad[i].split())  # a column name may hold a line break
        raise TraceError(f"{rows.place(i)}: {line} (--skip-bad leaves bad rows out)")
    ticks = np.array(time)
    doubt(ticks, form, warnings)
    columns = Columns(
        ticks, num_input, num_output, extras, waited, reasons, len(time), len(bad), [*rows.warnings, *warnings]
    )
    return columns.take([i for i in range(len(time)) if i not in bad]) if bad else columns, form


def with_unit(table: Rows, form: Format, options: Asked, warnings: list[str]) -> Format:
    """The asked unit, or the one in which the first and the last time are dates from 2000 to 2100."""
    if not is_number(date := table.first(form.time)):
        with suppress(ValueError):
            ns_of(date)
            form = replace(form, unit="datetime", doubtful=False)
    if options.time_unit is not None:
        if form.unit == "datetime":
            problem = f"{form.time} is a date and time, expected no --time-unit (it is {options.time_unit})"
            raise TraceError(f"{table.path}: {problem}")
        return replace(form, unit=options.time_unit, doubtful=False)
    ends = [float_of(str(rows.first(form.time))) for rows in (table, replace(table, rows=table.rows[::-1]))]
    is_open = form.unit in ("s", "ms")
    for unit, ticks in TICKS_PER_SECOND.items() if is_open else ():
        if all(DATES[0] <= end / ticks <= DATES[1] for end in ends):
            if unit != form.unit:
                day = datetime.fromtimestamp(min(ends) / ticks, UTC).date()
                warnings.append(f"{form.time} is read as {unit} since 1970 (from {day}): --time-unit says another unit")
            return replace(form, unit=unit, doubtful=False)
    return replace(form, doubtful=form.doubtful and is_open)


def doubt(time: Ticks, form: Format, warnings: list[str]) -> None:
    """Whether the unit may not be the format's."""
    if form.doubtful and len(time):
        if form.unit == "ms" and (time % 1 != 0).any():
            warnings.append(f"{form.time} is fractional and read as ms: if it counts seconds, say --time-unit s")
        duration = float(np.ptp(time)) / form.ticks
        rate = (len(time) - 1) / duration if duration > 0 else 1.0
        if not PLAUSIBLE_RATES[0] <= rate <= PLAUSIBLE_RATES[1]:
            reading = f"{form.time} read as {form.unit} makes {rate:.3g} req/s"
            warnings.append(f"{reading}: another --time-unit may be meant")


def arrivals(cells: Cells, form: Format, warnings: list[str]) -> list[Any]:
    """Ticks."""
    values = cells.rows.values(form.time)
    if form.unit != "datetime":
        return cells.column(form.time, TICK, values=values)
    zoned = [ZONE.search(str(value)) is not None for value in values if not is_missing(value)]
    if any(zoned) and not all(zoned):
        warnings.append(f"{zoned.count(False)} of {len(zoned)} times have no time zone: read as UTC")
    return cells.column(form.time, read_date, values=values)


def waits(
    cells: Cells, form: Format, time: list[Any], answered: npt.NDArray[np.bool_], num_output: Ints,
    gaps: list[Any] | None,
) -> dict[str, Floats]:  # fmt: skip
    """s from arrival to first token and end; NaN: unknown. Empty if no end is known."""
    if not (form.end or form.e2el):
        return {}
    units = TICKS_PER_SECOND[form.wait_unit]
    read = read_date if form.unit == "datetime" else TICK
    since = []
    for moment, wait in ((form.first, form.ttft), (form.end, form.e2el)):
        moments = cells.column(moment, read, True, math.nan)
        after = np.array([tick - begin for tick, begin in zip(moments, time, strict=True)], np.float64) / form.ticks
        lasting = np.array(cells.column(wait, TICK, True, math.nan), np.float64) / units
        since.append(np.where(answered, np.where(np.isnan(after), lasting, after), math.nan))
    first, end = since
    decode = np.array(cells.column(form.decode, TICK, True, math.nan), np.float64)
    if np.isfinite(decode).any():
        end = np.where(np.isnan(first), end, first + np.nan_to_num(decode) / units)
    if gaps is not None:
        sums = np.array([math.nan if values is None else sum(values) for values in gaps])
        end = np.where(np.isnan(end), first + sums / units, end)
    late = first > end + 1e-6  # rounding
    wrong = (first < 0) | (end < 0) | late | (np.fmax(first, end) > LONGEST_WAIT)

    def complaint(i: int) -> str:
        keys = ((form.ttft or form.first, first[i]), (form.end or form.e2el, end[i]))
        moments = " and ".join(f"{key} is {wait:g} s" for key, wait in keys if wait == wait)
        return f"{moments} after {form.time}, expected the first token from there on and the end after it"

    cells.complain(wrong, complaint)
    if form.is_log:  # the gateway did not see the first token
        first[(first == end) & (num_output > 1)] = math.nan
    return dict(zip(MEASURED, (first, end), strict=True))


def ns_of(stamp: Any) -> int:
    """ns since 1970 of an ISO date, which is in UTC without a time zone; ValueError."""
    if not isinstance(stamp, str):
        raise ValueError(f"{stamp} is no text")
    date = datetime.fromisoformat(stamp.strip())  # reads six digits of a second
    since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - EPOCH
    digits = FRACTION.search(stamp)
    return (since.days * 86_400 + since.seconds) * 10**9 + int(f"{digits[1][:9]:0<9}" if digits else 0)


def read_date(key: str, value: Any) -> int:
    """In ns since 1970."""
    try:
        tick = ns_of(value)
    except ValueError as error:
        raise BadRowError(f"{key} is {shown(value)}, expected a date and time such as {EXAMPLE}") from error
    if not 0 <= tick <= MAX_TICK:
        raise BadRowError(f"{key} is {shown(value)}, expected a date and time from 1970 to 2116")
    return tick


def read_number(key: str, value: Any, least: int = 0, high: int = MAX_TICK, integer: bool = False) -> int | float:
    """From a number or text."""
    number = value
    if isinstance(value, str) and "_" not in value:
        for kind in (int, float):
            with suppress(ValueError):
                number = kind(value)
                break
    if isinstance(number, bool) or not isinstance(number, int | float):
        text = "missing" if is_missing(value) else shown(value)
        raise BadRowError(f"{key} is {text}, expected a number of at least {least}")
    if not least <= number <= high:
        top = "a finite number" if number != number or number == math.inf else f"at most {high}"
        limit = f"at least {least}" if number < least else top
        raise BadRowError(f"{key} is {shown(value)}, expected {limit}")
    if integer and number % 1 != 0:
        raise BadRowError(f"{key} is {shown(value)}, expected a whole number")
    return int(number) if integer else number


def quick_numbers(
    values: list[Any], least: int = 0, high: int = MAX_TICK, integer: bool = False
) -> list[Any] | None:  # fmt: skip
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
        array = np.array(values, np.int64 if kinds == {int} else np.float64)
        if array.min() >= least and array.max() <= high and not (integer and kinds != {int} and (array % 1).any()):
            return list(map(int, values)) if integer and kinds != {int} else values
    return None


def read_gaps(key: str, value: Any) -> tuple[float, ...]:
    """Between chunks."""
    if not isinstance(value, list):
        raise BadRowError(f"{key} is {shown(value)}, expected a list")
    return tuple(float(read_number(f"{key}[{i}]", gap)) for i, gap in enumerate(value))


def read_hash_ids(key: str, value: Any) -> list[Any]:
    """A prompt's block ids, also as JSON text."""
    ids = value
    if isinstance(value, str):
        with suppress(ValueError):
            ids = json_of(value)
    if not isinstance(ids, list):
        raise BadRowError(f"{key} is {shown(value)}, expected a list")
    return ids


TICK = partial(read_number)
COUNT = partial(read_number, high=MAX_LENGTH, integer=True)
# Readers of checked optional columns.
CHECKED: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(COUNTS, partial(read_number, least=1, high=MAX_LENGTH, integer=True)),
    **dict.fromkeys(("deadline", "due", "chunks"), TICK),
    "priority": partial(read_number, least=-MAX_WHOLE, high=MAX_WHOLE, integer=True),
    "hash_ids": read_hash_ids,
    "gaps": read_gaps,
}
