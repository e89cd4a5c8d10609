"""The parts of a request's time where links join pools; they sum to e2el."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]

# In time order; ttft is the sum of all but the last.
PARTS = ("prefill_queue", "prefill", "reserve", "transfer", "decode_queue", "first_block", "rest")


def parts(columns: Columns, attempts: Columns | None = None) -> dict[str, Seconds]:
    """Seconds of each part, [requests]; 0 if skipped, NaN if unfinished.

    columns: of requests, and MOVE_COLUMNS. reserve: the wait for the decoding replica's pages, up to the lease.
    attempts: rows of earlier blocks where requests move once a block (BLOCK_COLUMNS); parts then sum over blocks, and
    decoding after the first tokens is the rest.
    """
    found = _of_rows(columns)
    if attempts is None or "left" not in attempts:
        return found
    over = np.flatnonzero(~np.isnan(attempts["left"]))
    rows = {name: column[over] for name, column in attempts.items()}
    for name, seconds in _of_rows(rows).items():
        np.add.at(found[name], rows["request"], seconds)
    return found


def _of_rows(columns: Columns) -> dict[str, Seconds]:
    moved, sent = columns["prefill_replica"] >= 0, columns["arrived"] > 0
    finish, there, first, end = (columns[name] for name in ("prefill_finish", "submitted", "first_emission", "finish"))
    begins, starts = columns.get("began", columns["arrival"]), columns.get("begun", columns["scheduled"])
    if "left" in columns:
        end = np.where(np.isnan(columns["left"]), end, columns["left"])
        first = np.where((first > starts) & (first <= end), first, starts)
    begun = np.where(sent, columns["transfer_start"], there)
    found = {
        "prefill_queue": columns["prefill_scheduled"] - begins,
        "prefill": finish - columns["prefill_scheduled"],
        "reserve": begun - finish,
        "transfer": there - begun,
    }
    return {name: np.where(moved, seconds, 0.0) for name, seconds in found.items()} | {
        "decode_queue": starts - np.where(moved, there, begins),
        "first_block": first - starts,
        "rest": end - first,
    }
