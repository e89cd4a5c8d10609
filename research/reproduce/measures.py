"""Compared measures: a summary's numbers, some others, ratios."""

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any

from ...engine.errors import DsimError
from ...files.read import cut, quoted
from ...results.metrics import METRICS, Summary
from ...sim.twin import RunRecords

OVER = " / "  # `output_throughput / AR`: over another series'


@dataclass(frozen=True)
class OwnMeasure:
    unit: str
    formula: str
    of: Callable[[RunRecords], float] | None  # None: not of a replay


MEASURES: dict[str, OwnMeasure] = {
    "decode_throughput": OwnMeasure(
        "tok/s", "output tokens / time in decode steps",
        lambda run: float(run.table["num_tokens"].sum()) / run.totals.decode_time,
    ),
    "tokens_per_step": OwnMeasure(
        "positions", "positions computed / decode steps", lambda run: run.totals.tokens / run.totals.num_decode_steps
    ),
    "capacity": OwnMeasure("req/s", "the highest rate at which every SLO holds (dsim capacity)", None),
    "peak_memory": OwnMeasure("GiB", "peak device memory of one request, weights included (peak_memory.py)", None),
}  # fmt: skip


def known_measure(where: str, measure: str, series: Sequence[str]) -> None:
    """DsimError unless it is a measure, or a ratio to another series'."""
    name, over, other = measure.partition(OVER)
    if over and other not in series:
        raise DsimError(
            f"{where}: {quoted(measure)} is over a series that is not there; there are {cut(', '.join(series))}"
        )
    if name not in MEASURES:
        _kind(where, name)


def unit_of(measure: str) -> str:
    """ "times" for a ratio."""
    if OVER in measure:
        return "times"
    if measure in MEASURES:
        return MEASURES[measure].unit
    head = measure.partition(".")[0]
    return METRICS[head.removesuffix("_ms")].unit


def of_run(measure: str, summary: Summary, result: RunRecords) -> float:
    """Not for ratios."""
    own = MEASURES.get(measure)
    if own is not None and own.of is not None:
        return own.of(result)
    number = attrgetter(measure)(summary)
    return math.nan if number is None else float(number)


def _kind(where: str, name: str) -> None:
    kind: Any = Summary
    for part in name.split("."):
        hints = typing.get_type_hints(kind) if is_dataclass(kind) else {}
        if part not in hints:
            known = ", ".join(MEASURES)
            raise DsimError(
                f"{where}: there is no measure {quoted(name)}, expected {known} or a number of `dsim replay --json`"
            )
        kind = next((kind for kind in typing.get_args(hints[part]) if kind is not NoneType), hints[part])
    if kind not in (int, float, bool):
        raise DsimError(f"{where}: {quoted(name)} is no number, expected one of its parts, such as {name}.p90")
