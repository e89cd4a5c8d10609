"""Kinds of steps by phase, tokens and batch, by which a latency model is judged and doubted."""

from typing import Any

import numpy as np
import numpy.typing as npt

SMALL_DECODE = 256  # tokens
SMALL_BATCH = 8  # sequences
KINDS_OF_STEPS = tuple(
    f"{phase} ({batch})"
    for phase in ("prefills", f"decode steps up to {SMALL_DECODE} tokens", f"decode steps above {SMALL_DECODE} tokens")
    for batch in ("1 sequence", f"2 to {SMALL_BATCH} sequences", f"more than {SMALL_BATCH} sequences")
)


def kinds_of(
    prefill: npt.NDArray[np.bool_], tokens: npt.NDArray[Any], batch: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """Each step's place in KINDS_OF_STEPS."""
    phase = np.where(prefill, 0, 1 + (tokens > SMALL_DECODE))
    return np.asarray(3 * phase + (batch > 1) + (batch > SMALL_BATCH), np.int64)
