"""A trace: requests' arrivals and lengths, in columns."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..engine.errors import TraceError
from ..engine.request import Request

if TYPE_CHECKING:
    import pandas as pd

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

COPY = "copy"  # optional column: number of a request's copy, where rows are taken again
ESTIMATE = "estimated_length"  # optional column: estimated answer lengths
# Optional columns for schedulers: fields of Request.
WISHES: dict[str, type] = {"priority": int, "deadline": float, "slo_class": str}
# Beyond these, a value is a mistake.
MAX_REQUESTS = 10_000_000  # 600 bytes each in a replay
MAX_LENGTH = 10_000_000  # tokens
MAX_TIME = 1e12  # s; in ms, more does not fit an integer
MIN_RATE, MAX_RATE = 1e-6, 1e9  # req/s


@dataclass(frozen=True, slots=True)
class TraceNotes:
    """A trace's origin, and the reader's changes."""

    path: str = ""
    format: str = ""
    num_rows: int = 0  # of the model, with the failed and bad
    num_unsorted: int = 0  # sorted since
    num_skipped: int = 0  # left out
    failed_in_trace: int = 0  # left out for an output length of 0
    warnings: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """What loading left out or sorted."""
        counts = {
            "failed dropped": self.failed_in_trace,
            "bad skipped": self.num_skipped,
            "out of order sorted": self.num_unsorted,
        }
        return "".join(f", {count:,} {kind}" for kind, count in counts.items() if count)


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests by arrival, one column per property; ties keep the file's order.

    `extras`: one list per optional column (formats.OPTIONAL), None for missing values.
    """

    name: str
    arrival: Floats  # s, the first is 0
    input_length: Ints  # tokens, at least 1
    output_length: Ints  # tokens, at least 1
    extras: dict[str, list[Any]] = field(default_factory=dict, repr=False)
    notes: TraceNotes = TraceNotes()

    def __post_init__(self) -> None:
        for name, dtype in (("arrival", np.float64), ("input_length", np.int64), ("output_length", np.int64)):
            column = np.array(getattr(self, name), dtype)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._check()

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def duration(self) -> float:
        """s from first to last arrival."""
        return float(self.arrival[-1])

    @property
    def rate(self) -> float:
        """req/s, 1 / mean gap; NaN if all arrive at once."""
        rate = (len(self) - 1) / self.duration if self.duration > 0 else math.nan
        return rate if rate < math.inf else math.nan

    def request(self, i: int) -> Request:
        """As the engine sees it."""
        counts, wishes = self._optional
        limit, estimate = ((column and column[i]) or 0 for column in counts)
        lengths = int(self.input_length[i]), int(self.output_length[i])
        stated = {name: kind(column[i]) for name, kind, column in wishes if column[i] is not None}
        return Request(i, float(self.arrival[i]), *lengths, max_tokens=limit, estimate=estimate, **stated)

    @cached_property
    def _optional(self) -> tuple[list[Any], list[tuple[str, type, list[Any]]]]:
        """Fields of Request: counts, and WISHES."""
        counts = [self.extras.get(name) for name in ("max_tokens", ESTIMATE)]
        return counts, [(name, kind, self.extras[name]) for name, kind in WISHES.items() if name in self.extras]

    @property
    def wishes(self) -> dict[str, npt.NDArray[Any]]:
        """Priorities, deadlines and limits, by columns of a run's table (state.RequestRow)."""
        wishes: dict[str, npt.NDArray[Any]] = {}
        if "max_tokens" in self.extras:
            wishes["limited"] = self.max_tokens > 0
        if "priority" in self.extras:
            wishes["priority"] = self.numbers("priority")
        if "deadline" in self.extras:
            wishes["deadline"] = np.array(self.extras["deadline"], np.float64)
        return wishes

    @property
    def max_tokens(self) -> Ints:
        """Limits of output tokens, which an EOS may undercut; 0: none."""
        return self.numbers("max_tokens")

    def numbers(self, name: str) -> Ints:
        """An optional column; 0 if missing."""
        column = self.extras.get(name, [None] * len(self))
        return np.array([number or 0 for number in column], np.int64)

    @property
    def limit(self) -> Ints:
        """Tokens at which a request ends at the latest: its limit, else its answer's length."""
        return np.maximum(self.output_length, self.max_tokens)

    @property
    def expected(self) -> Ints:
        """The answer lengths that routers and policies expect (Request.expected)."""
        if ESTIMATE not in self.extras:
            return self.limit
        estimate = self.numbers(ESTIMATE)
        return np.where(estimate > 0, estimate, self.limit)

    @property
    def lengths(self) -> tuple[Ints, Ints, Ints, Ints]:
        """input_length, output_length, limit, expected: as state.Asked."""
        return self.input_length, self.output_length, self.limit, self.expected

    def to_frame(self) -> "pd.DataFrame":
        """One row per request: arrival (s), input_length, output_length (tokens), optional columns."""
        import pandas as pd  # a live run needs no pandas

        extras = {
            name: pd.Series(column, dtype=object if None in column else None) for name, column in self.extras.items()
        }
        columns = {"arrival": self.arrival, "input_length": self.input_length, "output_length": self.output_length}
        return pd.DataFrame({**columns, **extras})

    def take(self, rows: npt.ArrayLike, times: Floats | None = None) -> "Trace":
        """These rows in this order, at their or the given times (s), shifted to start at 0."""
        index = np.asarray(rows, np.int64)
        arrival = self.arrival[index] if times is None else times
        extras = {name: [column[i] for i in index.tolist()] for name, column in self.extras.items()}
        return replace(
            self,
            arrival=arrival - arrival[:1],
            input_length=self.input_length[index],
            output_length=self.output_length[index],
            extras=extras,
        )

    def in_order(self, rows: Ints) -> "Trace":
        """Rows in this order, each after its own gap; second copies share prefixes and sessions with each other."""
        gaps = np.ones(len(self))
        if len(self) > 1:
            gaps = np.diff(self.arrival, prepend=-self.duration / (len(self) - 1))
        trace = self.take(rows, np.cumsum(gaps[rows]))
        if not {"hash_ids", "session_id"} & trace.extras.keys():
            return trace
        counts: Counter[int] = Counter()
        copies = []
        for row in rows.tolist():
            copies.append(counts[row])
            counts[row] += 1
        extras = {**trace.extras, COPY: copies}
        if "session_id" in extras:
            ids = zip(extras["session_id"], copies, strict=True)
            extras["session_id"] = [(name, copy) if copy and name is not None else name for name, copy in ids]
        return replace(trace, extras=extras)

    def head(self, n: int) -> "Trace":
        """TraceError if there are fewer."""
        if not 1 <= n <= len(self):
            raise TraceError(f"{self.name} holds {len(self)} requests, the run asks for {n}")
        return self.take(np.arange(n))

    def time_scaled(self, factor: float) -> "Trace":
        """Multiply every gap; above 1 is slower."""
        if not 0 < factor < math.inf:
            raise TraceError(f"time scale is {factor}, expected above 0 and finite")
        return replace(self, arrival=self.arrival * factor)

    def scaled_to_rate(self, rate: float) -> "Trace":
        """Scale all gaps to a mean rate (req/s)."""
        check_rate(rate)
        if not self.duration > 0:
            raise TraceError(f"{self.name} lasts 0 s, so it cannot be scaled to {rate} req/s")
        return self.time_scaled(self.rate / rate)

    def _check(self) -> None:
        """Equal lengths, sorted times, values in range."""
        sizes = {len(self), len(self.input_length), len(self.output_length), *map(len, self.extras.values())}
        if len(sizes) != 1 or not len(self):
            raise TraceError(f"{self.name}: columns of {sorted(sizes)} rows, expected one length of at least 1")
        if not 0 <= self.duration <= MAX_TIME or self.arrival[0] != 0 or not (np.diff(self.arrival) >= 0).all():
            raise TraceError(f"{self.name}: arrivals must start at 0, never decrease and end by {MAX_TIME:g} s")
        limits = self.max_tokens
        for name, column, least in (
            ("input_length", self.input_length, 1),
            ("output_length", self.output_length, 1),
            ("max_tokens", limits, np.where(limits == 0, 0, self.output_length)),
        ):
            for i in np.flatnonzero((column < least) | (column > MAX_LENGTH))[:1].tolist():
                least = np.broadcast_to(least, len(self))[i]
                raise TraceError(f"{self.name}: {name} of row {i} is {column[i]}, expected {least} to {MAX_LENGTH}")


def check_rate(rate: float) -> None:
    """rate: req/s."""
    if not 0 < rate < math.inf:
        raise TraceError(f"rate is {rate} req/s, expected above 0 and finite")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise TraceError(f"rate is {rate} req/s, expected {MIN_RATE:g} to {MAX_RATE:g}")
