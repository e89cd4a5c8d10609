"""Chance keyed by what it is about, never by the order of asking: a hash of the key is the draw.

The mixer is SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014). NumPy arrays of uint64 wrap on overflow.
"""

import numpy as np
import numpy.typing as npt

# Purposes: one stream of draws for each thing that is drawn.
COMMIT, STEP_FACTOR, BLOCK_FACTOR, REQUEST_FACTOR, PADDING, ARRIVAL, LENGTH, PROMPT, IMPORTANCE = range(1, 10)

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer on each element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    return z ^ (z >> np.uint64(31))


def key(*parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """A 64-bit key of whole numbers or arrays of them, broadcast together; their order matters."""
    z = np.zeros(1, np.uint64)
    for part in parts:
        z = mix((z + np.uint64(GOLDEN)) ^ (np.atleast_1d(np.asarray(part)).astype(np.uint64) * np.uint64(MIX2)))
    return z


def uniform(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """A number strictly between 0 and 1 for each key."""
    return ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
