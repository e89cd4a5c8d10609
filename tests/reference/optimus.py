"""Oracle of Optimus: what it learns of commits, and the chunk that it chooses (elastic-chunking.md 6.3)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dsim.engine.policies.optimus import ElasticChunk

TINY = 1e-12

Floats = npt.NDArray[np.float64]


@dataclass
class CommitCurve:
    """What Optimus learns while it runs: the commits to expect of a chunk, from the steps it has seen.

    f(m), the commits when the m leftmost masks are computed; N_commit(c) solves N = f(c - N), which leaves room for the
    committed tokens that take a slot once more.
    """

    size: int
    memory: int
    observed: int = 0  # steps
    # f[m]; f[0] = 0. Before the first observation: one commit a step.
    curve: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.curve):
            self.curve = np.ones(self.size + 1)
            self.curve[0] = 0.0

    def observe(self, counts: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]) -> None:
        """Take in a step: counts[m] rows computed at least m positions, whose first m committed sums[m] in all."""
        top = int(np.flatnonzero(counts).max(initial=0))
        if top == 0:
            return
        seen = sums[1 : top + 1] / counts[1 : top + 1]
        before = self.curve[top]
        # The plain mean at first, so that the start is forgotten; then an exponential one.
        weight = 1.0 / min(self.observed + 1, self.memory)
        self.curve[1 : top + 1] += weight * (seen - self.curve[1 : top + 1])
        if top < self.size:
            self.curve[top + 1 :] *= self.curve[top] / before
        self.observed += 1

    def expected(self, chunks: npt.NDArray[np.int64]) -> Floats:
        """N_commit(c): commits a sequence and step at each chunk."""
        slots = np.maximum.accumulate(np.arange(self.size + 1) + self.curve)
        below = np.clip(np.searchsorted(slots, chunks, side="right") - 1, 0, self.size - 1)
        # Masks computed when the window's slots are full, between whole numbers of them; never more than there are.
        masks = below + (chunks - slots[below]) / np.maximum(slots[below + 1] - slots[below], TINY)
        expected: Floats = chunks - np.minimum(masks, self.size)
        return expected


def choose_chunk(policy: ElasticChunk, curve: CommitCurve, chunks: npt.NDArray[np.int64], latency: Floats) -> int:
    """The chunk of the next step, for latencies T(c, b) of the candidates; ties go to the smallest."""
    largest = int(chunks[-1])
    if curve.observed < policy.cold_start:
        return largest
    rate = curve.expected(chunks) / latency
    best = int(np.argmax(rate))
    return int(chunks[best])
