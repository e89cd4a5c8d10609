"""The parts of a request's time where links join pools; they sum to e2el."""

import numpy as np

from .metrics import Columns, Floats

# In time order; ttft is the sum of all but the last.
PARTS = ("prefill_queue", "prefill", "reserve", "transfer", "decode_queue", "first_block", "rest")


def parts(columns: Columns) -> dict[str, Floats]:
    """Seconds of each part, [requests]; 0 if skipped, NaN if unfinished.

    columns: of requests, and MOVE_COLUMNS. reserve: the wait for the decoding replica's pages, up to the lease.
    """
    moved, over_link = columns["prefill_replica"] >= 0, columns["arrived"] > 0
    finish, entry, first, end = (columns[name] for name in ("prefill_finish", "submitted", "first_emission", "finish"))
    arrival, scheduled = columns["arrival"], columns["scheduled"]
    start = np.where(over_link, columns["transfer_start"], entry)
    before = {
        "prefill_queue": columns["prefill_scheduled"] - arrival,
        "prefill": finish - columns["prefill_scheduled"],
        "reserve": start - finish,
        "transfer": entry - start,
    }
    return {name: np.where(moved, seconds, 0.0) for name, seconds in before.items()} | {
        "decode_queue": scheduled - np.where(moved, entry, arrival),
        "first_block": first - scheduled,
        "rest": end - first,
    }
