"""Batching: when requests join and leave the batch, continuously as in LMDeploy or between blocks as in SGLang."""

from dataclasses import dataclass

from .errors import PolicyError


@dataclass(frozen=True)
class Continuous:
    """LMDeploy: prefill first, and decode in groups of steps in which the batch is frozen (block-diffusion.md 2.1)."""

    max_batch: int | None = None  # None: the device's default, at most max_prefill_tokens // block_length
    max_prefill_tokens: int = 4096  # padded prompt tokens of one prefill
    num_loops: int | None = None  # steps of a group; None: min(prefill_interval, 2 * (page // block_length))
    prefill_interval: int = 16
    decide_ahead: bool = False  # decide on the next batch as a group's last step begins, as LMDeploy's prefetch does

    def __post_init__(self) -> None:
        _check_batch(self.max_batch, self.max_prefill_tokens)
        if self.num_loops is not None and self.num_loops < 1:
            raise PolicyError(f"num_loops is {self.num_loops}, expected at least 1")
        if self.prefill_interval < 1:
            raise PolicyError(f"prefill_interval is {self.prefill_interval}, expected at least 1")

    def group_steps(self, page_size: int, block_length: int) -> int:
        """Steps of a decode group."""
        if self.num_loops is not None:
            return self.num_loops
        return max(1, min(self.prefill_interval, 2 * (page_size // block_length)))

    def prefers_prefill(self, waiting: int, ready: int, max_batch: int) -> bool:
        """Whether to prefill next, with `ready` sequences that could decode.

        Deciding ahead sees few as ready, for most are in flight, so that whoever waits is nearly always let in; that
        is the rule where nothing is decided ahead.
        """
        if not self.decide_ahead:
            return waiting > 0
        return waiting > 0 and (waiting >= 4 or ready < 0.5 * max_batch)


@dataclass(frozen=True)
class BlockSynchronous:
    """SGLang's sync mode: the batch changes between blocks, each as slow as its slowest (block-diffusion.md 2.3)."""

    max_batch: int | None = None
    max_prefill_tokens: int = 4096

    def __post_init__(self) -> None:
        _check_batch(self.max_batch, self.max_prefill_tokens)

    def prefers_prefill(self, waiting: int, ready: int, max_batch: int) -> bool:
        """Prefill first, first come first served."""
        return waiting > 0


@dataclass(frozen=True)
class Static:
    """A research script's server: a batch is padded to its longest, runs all steps in lock-step and ends together."""

    max_batch: int | None = 1  # None: the device's default; public codes of cached loops take one request at a time
    max_num_logits: int = 4096  # rows of logits that may exist at once

    def __post_init__(self) -> None:
        _check_batch(self.max_batch, self.max_num_logits, "max_num_logits")

    @property
    def max_prefill_tokens(self) -> int:
        """What memory is set aside for, as a prefill of so many tokens would need it."""
        return self.max_num_logits


@dataclass(frozen=True)
class PhaseMultiplexed:
    """dLLM-Serve: refreshes and reuses of many requests in one step, under a budget of query tokens (4.3).

    The fields' defaults are the published scheduler, step for step; each repairs one of its faults.
    """

    max_batched_tokens: int = 16384  # query tokens of a step
    max_batch: int | None = 512
    max_num_logits: int = 1024  # rows of logits that may exist at once (logit decomposition)
    hold_behind_stalled: bool = True  # who stands behind a refresh that does not fit is not run either
    admit_past_stalled: bool = True  # a waiting request may take the budget that a stalled one could not use
    newcomers_first: bool = True  # and stands before the stalled one from then on
    look_ahead: bool = False  # admit only whom every step of the next block has room for

    def __post_init__(self) -> None:
        _check_batch(self.max_batch, self.max_num_logits, "max_num_logits")
        if self.max_batched_tokens < 1:
            raise PolicyError(f"max_batched_tokens is {self.max_batched_tokens}, expected at least 1")

    @property
    def max_prefill_tokens(self) -> int:
        """What memory is set aside for, as a prefill of so many tokens would need it."""
        return self.max_num_logits


Batching = Continuous | BlockSynchronous | Static | PhaseMultiplexed


def _check_batch(max_batch: int | None, limit: int, name: str = "max_prefill_tokens") -> None:
    if max_batch is not None and max_batch < 1:
        raise PolicyError(f"max_batch is {max_batch}, expected at least 1")
    if limit < 1:
        raise PolicyError(f"{name} is {limit}, expected at least 1")
