"""The parts of a request's time when links join pools; they add up to its latency (`e2el`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]

# In time order. `first_block` ends with the first token, so ttft is the sum of all but the last.
PARTS = ("prefill_queue", "prefill", "reserve", "transfer", "decode_queue", "first_block", "rest")


def parts(columns: Columns, attempts: Columns | None = None) -> dict[str, Seconds]:
    """The seconds of each part, [requests]; 0 if a request skips it, NaN if the request did not finish.

    columns: of requests, and MOVE_COLUMNS. reserve: the wait for pages of the decoding replica, up to the lease.
    attempts: where requests move once a block (BLOCK_COLUMNS), the rows of the blocks before each request's last one. A
    part is then the sum over the blocks; decoding after the first tokens is the rest.
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
