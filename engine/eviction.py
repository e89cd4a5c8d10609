"""Token eviction inside the block: which committed tokens are computed no more."""

from dataclasses import dataclass

from .errors import PolicyError


@dataclass(frozen=True)
class NoEviction:
    """Every position of the block is computed every step, and once more when the block is complete."""


@dataclass(frozen=True)
class DelayedCache:
    """A committed token leaves the computation once it has been computed as itself (elastic-chunking.md 6.1).

    neighbour_aware: only when its right neighbour was committed too (FOCUS's DC+, focus.md 3.6).
    """

    neighbour_aware: bool = False
    prefill_counts: bool = True  # prompt tokens of the first, partial block are right after prefill (FOCUS: not)
    # What a query sees in its block: the cached and the computed ones, or with "prefix" all up to the last computed.
    visible: str = "listed"
    sample_block: bool = False  # soft-max and sampling run on the whole block, computed or not (FOCUS, focus.md 3.2)

    def __post_init__(self) -> None:
        if self.visible not in ("listed", "prefix"):
            raise PolicyError(f"visible is {self.visible!r}, expected listed or prefix")


Eviction = NoEviction | DelayedCache
