"""Token eviction inside the block: which committed tokens are computed no more."""

from dataclasses import dataclass

from .errors import PolicyError

SCOPES = ("block", "request", "carry")


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


@dataclass(frozen=True)
class Focus(DelayedCache):
    """FOCUS: of the masked tokens, only those whose importance grew most from the first layer to the second go on.

    The delayed cache is DC+, and the choice is engine/focus.py's (focus.md 3). Where published codes differ (3.11), the
    defaults are LMDeploy's.
    """

    neighbour_aware: bool = True
    prefill_counts: bool = False
    visible: str = "prefix"
    sample_block: bool = True
    alpha: float = 1.5  # the budget is the mean of the tokens decoded a step, times this
    # That mean is of the block's steps; of all the request's ("request", the paper's E.3.1); or of the block before
    # until this one decodes ("carry", the Hugging Face code).
    scope: str = "block"
    sample_deviation: bool = False  # divide by n - 1, as the Hugging Face code does
    exact_block: bool = False  # a complete block is computed once more as a whole (Hugging Face), not only what is left
    second_layer_sees: str = "retained"  # how far the second layer's queries see in the block; or "computed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= self.alpha < float("inf"):
            raise PolicyError(f"alpha is {self.alpha}, expected at least 1")
        if self.scope not in SCOPES:
            raise PolicyError(f"scope is {self.scope!r}, expected block, request or carry")
        if self.second_layer_sees not in ("retained", "computed"):
            raise PolicyError(f"second_layer_sees is {self.second_layer_sees!r}, expected retained or computed")


Eviction = NoEviction | DelayedCache
