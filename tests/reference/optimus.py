"""Granularity: how many positions a sequence computes a step: one, a block, a fixed chunk or an elastic one."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .errors import PolicyError

TINY = 1e-12
MAX_BLOCK = 64  # the largest block of a published checkpoint

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Autoregressive:
    """One token a sequence and step, on the same latency model."""


@dataclass(frozen=True)
class FixedBlock:
    """The whole block, every step (vanilla block diffusion, block-diffusion.md 1.3)."""

    block_length: int = 32

    def __post_init__(self) -> None:
        _check_block(self.block_length)


@dataclass(frozen=True)
class FixedChunk:
    """At most `chunk` positions of the block, streaming as its prefix is cached (elastic-chunking.md 6.2)."""

    chunk: int = 8
    block_length: int = 32
    obs: bool = False  # out-of-block streaming: the window may reach into the next block
    window: str = "pending-first"  # W2; "in-order" is W1 (6.4 a)

    def __post_init__(self) -> None:
        _check_block(self.block_length)
        _check_window(self.window)
        if not 2 <= self.chunk <= self.block_length:
            raise PolicyError(
                f"chunk is {self.chunk}, expected 2 to the block length {self.block_length}: "
                "a token is computed twice, so one position a step commits half a token"
            )


@dataclass(frozen=True)
class ElasticChunk:
    """c* = argmax over the candidates of N_commit(c) b / T(c, b), each step (Optimus, elastic-chunking.md 6.3)."""

    max_chunk: int = 32
    block_length: int = 32
    candidates: tuple[int, ...] = ()  # empty: every even number up to max_chunk (6.4 d)
    obs: bool = False
    window: str = "pending-first"
    estimator: str = "robust"  # or "literal", as the paper words it (6.3)
    memory: int = 300  # steps that the running average of commits remembers
    cold_start: int = 16  # observed steps at the largest chunk before choosing
    probe_every: int = 0  # run the largest chunk once in so many steps; 0: never
    hysteresis: float = 0.0  # relative gain needed to change the chunk

    def __post_init__(self) -> None:
        _check_block(self.block_length)
        _check_window(self.window)
        if not 2 <= self.max_chunk <= self.block_length:
            raise PolicyError(f"max_chunk is {self.max_chunk}, expected 2 to the block length {self.block_length}")
        for c in self.candidates:
            if not 2 <= c <= self.max_chunk:
                raise PolicyError(f"a candidate chunk is {c}, expected 2 to the largest chunk {self.max_chunk}")
        if self.estimator not in ("robust", "literal"):
            raise PolicyError(f"estimator is {self.estimator!r}, expected robust or literal")
        for name, least in (("memory", 1), ("cold_start", 0), ("probe_every", 0), ("hysteresis", 0)):
            if not getattr(self, name) >= least:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected at least {least}")

    def chunks(self) -> tuple[int, ...]:
        """The candidate set, ascending."""
        return tuple(sorted(set(self.candidates))) or tuple(range(2, self.max_chunk + 1, 2))


Granularity = Autoregressive | FixedBlock | FixedChunk | ElasticChunk


@dataclass
class CommitCurve:
    """What Optimus learns while it runs: the commits to expect of a chunk, from the steps it has seen.

    robust: f(m), the commits when the m leftmost masks are computed; N_commit(c) solves N = f(c - N), which leaves
    room for the committed tokens that take a slot once more. literal: n(c), the commits among a window's first c.
    """

    size: int
    robust: bool
    memory: int
    observed: int = 0  # steps
    # f[m] or n[c]; f[0] = 0. Before the first observation: one commit a step.
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
        if self.robust and top < self.size:
            self.curve[top + 1 :] *= self.curve[top] / before
        self.observed += 1

    def expected(self, chunks: npt.NDArray[np.int64]) -> Floats:
        """N_commit(c): commits a sequence and step at each chunk."""
        if not self.robust:
            return self.curve[chunks]
        slots = np.maximum.accumulate(np.arange(self.size + 1) + self.curve)
        below = np.clip(np.searchsorted(slots, chunks, side="right") - 1, 0, self.size - 1)
        # Masks computed when the window's slots are full, between whole numbers of them; never more than there are.
        masks = below + (chunks - slots[below]) / np.maximum(slots[below + 1] - slots[below], TINY)
        expected: Floats = chunks - np.minimum(masks, self.size)
        return expected


def choose_chunk(
    policy: ElasticChunk, curve: CommitCurve, chunks: npt.NDArray[np.int64], latency: Floats, last: int, step: int
) -> int:
    """The chunk of the next step, for latencies T(c, b) of the candidates; ties go to the smallest."""
    largest = int(chunks[-1])
    if curve.observed < policy.cold_start or (policy.probe_every and step % policy.probe_every == 0):
        return largest
    rate = curve.expected(chunks) / latency
    best = int(np.argmax(rate))
    if policy.hysteresis and last:
        held = int(np.searchsorted(chunks, last))
        if rate[best] <= rate[held] * (1 + policy.hysteresis):
            return last
    return int(chunks[best])


def _check_block(block_length: int) -> None:
    if not 1 <= block_length <= MAX_BLOCK:
        raise PolicyError(f"block_length is {block_length}, expected 1 to {MAX_BLOCK}")


def _check_window(window: str) -> None:
    if window not in ("pending-first", "in-order"):
        raise PolicyError(f"window is {window!r}, expected pending-first or in-order")
