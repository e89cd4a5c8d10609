"""Request and step columns written by hand, for tests: nothing here was simulated or measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, StepTotals

Columns = dict[str, npt.NDArray[Any]]

INTEGERS = {name for name, dtype in REQUEST_COLUMNS.items() if not dtype.startswith("float")}


def request_columns(rows: Sequence[dict[str, Any]]) -> Columns:
    """Request columns from rows that say only what matters; the rest is zero, or NaN for a time."""
    columns = {}
    for name, dtype in REQUEST_COLUMNS.items():
        missing = 0 if name in INTEGERS else np.nan
        columns[name] = np.array([row.get(name, missing) for row in rows], dtype)
    columns["request"] = np.arange(len(rows), dtype="int32")
    return columns


def request(emissions: Sequence[tuple[float, int]], *, arrival: float = 0.0, **more: Any) -> dict[str, Any]:
    """A completed request that emits (seconds after its arrival, tokens); its first emission is its first block."""
    times = [arrival + t for t, _ in emissions]
    num_tokens = sum(n for _, n in emissions)
    return {
        "status": STATUSES.index("completed"), "arrival": arrival, "scheduled": arrival, "first_commit": times[0],
        "first_block": times[0], "first_emission": times[0], "last_emission": times[-1], "finish": times[-1],
        "output_length": num_tokens, "num_first": emissions[0][1], "num_tokens": num_tokens,
        "num_committed": num_tokens, "num_emissions": len(emissions), **more,
    }  # fmt: skip


def rejected(arrival: float = 0.0) -> dict[str, Any]:
    return {"status": STATUSES.index("rejected"), "arrival": arrival}


def unfinished(arrival: float = 0.0) -> dict[str, Any]:
    return {"status": STATUSES.index("unfinished"), "arrival": arrival}


def totals_of(*streams: Sequence[tuple[float, int]]) -> StepTotals:
    """Totals that hold only the gaps between the streams' emissions."""
    totals = StepTotals()
    for emissions in streams:
        totals.itl.add_many(np.diff([t for t, _ in emissions]))
    return totals
