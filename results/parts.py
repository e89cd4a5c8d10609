"""The parts of a request's time when links join pools; they add up to its latency (`e2el`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

# In time order. `first_block` ends with the first token, so ttft is the sum of all but the last.
PARTS = ("prefill_queue", "prefill", "reserve", "transfer", "decode_queue", "first_block", "rest")


def parts(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Seconds]:
    """The seconds of each part, [requests]; 0 if a request skips it, NaN if the request did not finish.

    columns: of requests, and MOVE_COLUMNS. reserve: the wait for pages of the decoding replica, up to the lease.
    """
    moved, sent = columns["prefill_replica"] >= 0, columns["arrived"] > 0
    arrival, finish, there = columns["arrival"], columns["prefill_finish"], columns["submitted"]
    begun = np.where(sent, columns["transfer_start"], there)
    found = {
        "prefill_queue": columns["prefill_scheduled"] - arrival,
        "prefill": finish - columns["prefill_scheduled"],
        "reserve": begun - finish,
        "transfer": there - begun,
    }
    return {name: np.where(moved, seconds, 0.0) for name, seconds in found.items()} | {
        "decode_queue": columns["scheduled"] - np.where(moved, there, arrival),
        "first_block": columns["first_emission"] - columns["scheduled"],
        "rest": columns["finish"] - columns["first_emission"],
    }
