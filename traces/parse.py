"""Rows to numbers, one by one, to name the bad one."""

import json
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
from ..files.read import float_of, json_of
from .chosen import OF_LOG, chosen, failures
from .formats import CLIENT, MEASURED, TICKS_PER_SECOND, Asked, Format
from .rows import Row, Rows, is_missing
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
LONGEST_WAIT = 1e6  # s: a time in another unit
EXAMPLE = "2026-03-01T10:00:00Z"
DATES = (946_684_800.0, 4_102_444_800.0)  # s since 1970: 2000 to 2100
ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)\s*$", re.ASCII)
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
    """Reads columns of rows; holds the bad rows' complaints, and the rows whose cells may be empty."""

    found: Rows
    bad: dict[int, str]
    failed: set[int]

    def each(self, values: list[Any], read: Callable[[Any], Any], other: Any = None) -> list[Any]:
        """Every value as read; `other` in place of a bad one."""
        results = []
        for i, value in enumerate(values):
            try:
                results.append(read(value))
            except BadRowError as complaint:
                self.bad.setdefault(i, str(complaint))
                results.append(other)
        return results

    def values(self, key: str) -> list[Any]:
        return self.found.values(key) if key else [None] * len(self.found.rows)

    def lengths(self, key: str, values: list[Any], optional: bool) -> list[Any]:
        """Tokens; 0 for a missing count that is optional, and for a failed request's that is missing or odd."""
        quick = quick_numbers(values, MAX_LENGTH, True)
        if quick is not None:
            return quick
        given = [0 if optional and is_missing(value) else value for value in values]
        for i in self.failed:
            given[i] = (quick_numbers([given[i]], MAX_LENGTH, True) or [0])[0]
        return self.each(given, lambda value: read_whole(key, value, 0, MAX_LENGTH), 0)

    def numbers(self, key: str, read: Callable[[str, Any], Any], empty: float | None = None) -> list[Any]:
        """At least 0. empty: in place of missing ones, which are else bad."""
        values = self.values(key)
        quick = quick_numbers(values, MAX_TICK, False) if read is read_tick else None
        if quick is not None:
            return quick
        optional = empty is not None
        return self.each(values, lambda v: empty if optional and is_missing(v) else read(key, v), empty or 0)

    def moments(self, key: str, form: Format, empty: float | None = None) -> list[Any]:
        """In the format's unit; dates in ns."""
        return self.numbers(key, read_date if form.unit == "datetime" else read_tick, empty)


def columns_of_rows(found: Rows, form: Format, asked: Asked) -> tuple[Columns, Format]:
    """A bad row raises TraceError, or is left out and counted. The format has the unit of the times."""
    found, warnings = chosen(found, form, asked.only)
    form = with_unit(found, form, asked, warnings)
    reasons, unknown = failures(found, form)
    bad = dict(found.bad)
    cells = Cells(found, bad, {i for i, why in enumerate(reasons) if why})
    num_input = input_lengths(cells, form, warnings)
    time = arrivals(cells, form, warnings)
    num_output = cells.lengths(form.output, cells.values(form.output), form.report)
    num_output = [0 if why else count for why, count in zip(reasons, num_output, strict=True)]
    for i, (tokens, answer) in enumerate(zip(num_input, num_output, strict=True)):
        if tokens < 1 and answer > 0 and not form.report:
            bad.setdefault(i, f"{form.input} is {tokens}, expected at least 1")
    extras = {}
    for theirs, ours in form.extras.items():
        if found.has(theirs) and ours not in OF_LOG:
            values = without_missing(found.values(theirs))
            values = cells.each(values, partial(read_extra, ours, theirs)) if ours in CHECKED else values
            if values.count(None) < len(values):
                extras[ours] = values
    waited = waits(cells, form, time, num_output, extras.get("gaps"))
    if bad and not asked.skip_bad:
        i = min(bad)
        line = " ".join(bad[i].split())  # a column name may hold a line break
        raise TraceError(f"{found.place(i)}: {line} (--skip-bad leaves bad rows out)")
    lengths = np.array(num_input, np.int64), np.array(num_output, np.int64)
    warnings = [*found.warnings, *warnings, *unknown]
    columns = Columns(np.array(time), *lengths, extras, waited, reasons, len(time), len(bad), warnings)
    if bad:
        columns = columns.take([i for i in range(len(time)) if i not in bad])
    return once(columns) if form.own else columns, form


def with_unit(found: Rows, form: Format, asked: Asked, warnings: list[str]) -> Format:
    """The asked unit, or the one in which the first and the last time are dates from 2000 to 2100."""
    if asked.time_unit is not None:
        if form.unit == "datetime":
            what = f"{form.time} is a date and time, expected no --time-unit (it is {asked.time_unit})"
            raise TraceError(f"{found.path}: {what}")
        return replace(form, unit=asked.time_unit, doubtful=False)
    if asked.format is not None or form.unit not in ("s", "ms"):
        return replace(form, doubtful=form.doubtful and asked.format is None)
    ends = [float_of(str(rows.first(form.time))) for rows in (found, replace(found, rows=found.rows[::-1]))]
    for unit, ticks in TICKS_PER_SECOND.items():
        if all(DATES[0] <= end / ticks <= DATES[1] for end in ends):
            if unit != form.unit:
                day = datetime.fromtimestamp(min(ends) / ticks, UTC).date()
                warnings.append(f"{form.time} is read as {unit} since 1970 (from {day}): --time-unit says another unit")
            return replace(form, unit=unit, doubtful=False)
    return form


def arrivals(cells: Cells, form: Format, warnings: list[str]) -> list[Any]:
    """Ticks; a row with a delay and no time follows its session's last turn."""
    if form.unit != "datetime" and "delay" in form.extras and any(map(is_missing, cells.found.values(form.time))):
        last: dict[Any, int | float] = {}
        delayed: list[Row] = []

        def read(row: Row) -> int | float:
            session = session_of(row)
            if is_missing(row.get(form.time)) and row.get("delay") is not None and session in last:
                delay = read_tick("delay", row["delay"]) * form.ticks / 1e3
                tick = read_tick(form.time, last[session] + delay)
                delayed.append(row)
            else:
                tick = read_tick(form.time, row.get(form.time))
            if session is not None:
                last[session] = tick
            return tick

        time = cells.each(cells.found.rows, read, 0)
        if delayed:
            after = "they arrive that long after their session's last turn"
            warnings.append(f"{len(delayed)} rows have a delay in place of a time: {after}")
        return time
    time = cells.moments(form.time, form)
    if form.unit == "datetime":
        values = cells.found.values(form.time)
        zoned = [ZONE.search(str(value)) is not None for value in values if not is_missing(value)]
        if any(zoned) and not all(zoned):
            warnings.append(f"{zoned.count(False)} of {len(zoned)} times have no time zone: read as UTC")
    return time


def input_lengths(cells: Cells, form: Format, warnings: list[str]) -> list[Any]:
    """Tokens; estimated for a text."""
    lengths = cells.values(form.input)
    texts = enumerate(cells.values(form.text))
    estimated = {i: num_tokens(text) for i, text in texts if isinstance(text, str) and lengths[i] is None}
    if estimated:
        lengths = [estimated.get(i, length) for i, length in enumerate(lengths)]
        what = f"counted as {BYTES_PER_TOKEN} bytes a token"
        warnings.append(f"{len(estimated)} rows have a text in place of an input length: {what}")
    return cells.lengths(form.input, lengths, form.report)


def waits(
    cells: Cells, form: Format, time: list[Any], num_output: list[int], gaps: list[Any] | None
) -> dict[str, Floats]:  # fmt: skip
    """Ticks from arrival to first token and end; NaN: unknown. Empty if no end is known."""
    if not (form.end or form.e2el):
        return {}
    scale = form.ticks / TICKS_PER_SECOND[form.wait_unit]
    known = []
    for moment, wait in ((form.first, form.ttft), (form.end, form.e2el)):
        after = [end - begin for end, begin in zip(cells.moments(moment, form, math.nan), time, strict=True)]
        if wait:
            lasting = cells.numbers(wait, read_tick, math.nan)
            after = [end if end == end else scale * length for end, length in zip(after, lasting, strict=True)]
        known.append(after)
    first, end = known
    if gaps is not None:
        end = [
            whole if whole == whole or each is None else begin + scale * sum(each)
            for begin, whole, each in zip(first, end, gaps, strict=True)
        ]
    slack, longest = 1e-6 * form.ticks, LONGEST_WAIT * form.ticks
    for i, (begin, whole) in enumerate(zip(first, end, strict=True)):
        if i in cells.failed or (num_output[i] == 0 and not form.report):  # no answer
            first[i] = end[i] = math.nan
        elif begin < 0 or whole < 0 or begin > whole + slack or max(begin, whole) > longest:
            moments = " and ".join(
                f"{key} is {wait / form.ticks:g} s"
                for key, wait in ((form.ttft or form.first, begin), (form.end or form.e2el, whole))
                if wait == wait
            )
            what = f"{moments} after {form.time}, expected the first token from there on and the end after it"
            cells.bad.setdefault(i, what)
        elif begin == whole and num_output[i] > 1 and not form.report:  # the gateway did not see the first token
            first[i] = math.nan
    return {name: np.array(waited, np.float64) for name, waited in zip(MEASURED, (first, end), strict=True)}


def once(columns: Columns) -> Columns:
    """Without requests exported again: of the same id, time and lengths."""
    ids = columns.extras.get("id")
    if ids is None:
        return columns
    first: dict[Any, int] = {}
    seen = zip(map(str, ids), columns.time.tolist(), columns.output_length.tolist(), strict=True)
    kept = [i for i, key in enumerate(seen) if ids[i] is None or first.setdefault(key, i) == i]
    if len(kept) == len(ids):
        return columns
    num_again = len(ids) - len(kept)
    warning = f"{num_again} rows repeat a request (id and time) and are left out"
    return replace(
        columns.take(kept), num_rows=columns.num_rows - num_again, warnings=[*columns.warnings, warning]
    )  # fmt: skip


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


def read_tick(key: str, value: Any) -> int | float:
    return read_number(key, value, 0)


def read_date(key: str, value: Any) -> int:
    """In ns since 1970."""
    try:
        tick = ns_of(value)
    except ValueError as error:
        what = f"a date and time such as {EXAMPLE}"
        raise BadRowError(f"{key} is {shown(value)}, expected {what}") from error
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
    if is_missing(value) and not isinstance(value, float):
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


def without_missing(values: list[Any]) -> list[Any]:
    """None in place of empty cells."""
    may_miss = not set(map(type, values)) <= {str, int, list} or "" in values or "-" in values
    return [None if is_missing(value) else value for value in values] if may_miss else values


def quick_numbers(values: list[Any], most: int, whole: bool) -> list[Any] | None:
    """All values as numbers from 0 to `most`; None if one needs a closer look."""
    kinds = set(map(type, values))
    if kinds == {str} and not any("_" in value for value in values):
        try:
            values = list(map(int, values))
        except ValueError:
            with suppress(ValueError):
                values = list(map(float, values))
        kinds = set(map(type, values))
    if not values or not kinds <= {int, float}:
        return None
    with suppress(OverflowError):
        array = np.array(values, np.int64 if kinds == {int} else np.float64)
        if array.min() >= 0 and array.max() <= most and not (whole and kinds != {int} and (array % 1).any()):
            return list(map(int, values)) if whole and kinds != {int} else values
    return None


def read_extra(ours: str, theirs: str, value: Any) -> Any:
    """None if missing."""
    return None if value is None else CHECKED[ours](theirs, value)


def read_gaps(key: str, value: Any) -> tuple[float, ...]:
    """Between chunks."""
    if not isinstance(value, list):
        raise BadRowError(f"{key} is {shown(value)}, expected a list")
    return tuple(float(read_number(f"{key}[{i}]", gap, 0)) for i, gap in enumerate(value))


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
    "gaps": read_gaps,
    **dict.fromkeys(("due", "chunks", *CLIENT.values()), partial(read_number, least=0)),
}
