"""The KV cache of a full-sequence model: what each denoising step computes and sees, by where its request stands.

Such a model (LLaDA, Dream) attends in both directions, so that keys change while tokens are committed: a cache of them
is an approximation, refreshed by full passes (full-sequence-diffusion.md 1 to 4). Every answer is for a whole batch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PolicyError
from .step import Phase

Ints = npt.NDArray[np.int64]
LOGITS = ("block", "all")
RUN = 16  # keys: where heads keep different ones, each head's lie in runs of so many


class Standing(NamedTuple):
    """Where requests stand, one entry a row; tokens of a request are its prompt and its canvas of whole blocks."""

    prompt: Ints  # tokens
    length: Ints  # prompt and canvas
    start: Ints  # first position of the current block
    step: Ints  # steps taken
    block_step: Ints  # of those, in the current block
    block: int  # tokens of a block


class Work(NamedTuple):
    """What a step does, one entry a row."""

    phases: npt.NDArray[np.uint8]
    tokens: Ints  # query positions
    keys: Ints  # that each of them sees


@dataclass(frozen=True)
class ExactCache:
    """Keys and values of all that lies before the block, as block-diffusion and autoregressive models have them."""


@dataclass(frozen=True)
class NoCache:
    """Every step computes the whole sequence (LLaDA's and Dream's own loop, 1.1)."""

    logits: str = "all"  # rows through the LM head in a pass over more than the block: "all" of it, or the "block"

    def __post_init__(self) -> None:
        _check_logits(self.logits)

    def work(self, at: Standing) -> Work:
        """What the next step of each request does."""
        return Work(_phases(at, Phase.FULL), at.length, at.length)

    def head_rows(self, at: Standing, tokens: Ints) -> Ints:
        """Rows through the LM head of a step that computes so many tokens."""
        return tokens if self.logits == "all" else np.minimum(tokens, at.block)

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        """Tokens' worth of keys and values that requests hold while they run.

        state: that the outputs of a token's attention and feed-forward take: 1 where keys are as wide as hidden states.
        """
        return np.zeros_like(length)


@dataclass(frozen=True)
class FastCache(NoCache):
    """Fast-dLLM: a full pass as a block begins, then the block alone against all cached keys (1.4).

    reuse: "dual" computes the block; "prefix" the block and all after it, which is cached no longer than a step.
    """

    reuse: str = "dual"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse not in ("dual", "prefix"):
            raise PolicyError(f"reuse is {self.reuse!r}, expected dual or prefix")

    def work(self, at: Standing) -> Work:
        full = at.block_step == 0
        tokens = np.full_like(at.length, at.block) if self.reuse == "dual" else at.length - at.start
        return Work(
            np.where(full, Phase.FULL, Phase.REUSE).astype(np.uint8), np.where(full, at.length, tokens), at.length
        )

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        return length


@dataclass(frozen=True)
class SparseCache(NoCache):
    """Sparse-dLLM and dLLM-Serve: delay + 1 full passes a block, the last of which chooses the keys to keep (2.1, 4.2).

    The others compute the block against the `retention` share of the keys outside it that pooled scores of the block's
    mean query choose: the same for all heads, or each head its own (`head_centric`).
    """

    retention: float = 0.5
    pool_width: int = 3
    delay: int = 1
    prefix_only: bool = False  # choose among the keys before the block, and keep all after it (Alg. 5)
    head_centric: bool = False
    at_least: int = 0  # keys kept: dLLM-Serve never keeps none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.retention <= 1.0:
            raise PolicyError(f"retention is {self.retention}, expected 0 to 1")
        if self.pool_width < 1 or self.pool_width % 2 == 0:
            raise PolicyError(f"pool_width is {self.pool_width}, expected an odd number of at least 1")
        for name in ("delay", "at_least"):
            if getattr(self, name) < 0:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected at least 0")

    def kept(self, at: Standing) -> Ints:
        """Keys outside the block that reuse steps see."""
        outside = at.length - at.block
        candidates = at.start if self.prefix_only else outside
        chosen = np.minimum(candidates, np.maximum(self.at_least, np.floor(candidates * self.retention)))
        return np.asarray(chosen, np.int64) + (outside - candidates)

    def work(self, at: Standing) -> Work:
        phases = np.where(at.block_step < self.delay, Phase.FULL, Phase.PACK)
        reuse = at.block_step > self.delay
        return Work(
            np.where(reuse, Phase.REUSE, phases).astype(np.uint8),
            np.where(reuse, at.block, at.length),
            np.where(reuse, self.kept(at) + at.block, at.length),
        )

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        tokens: Ints = np.maximum(max(1, self.at_least), np.ceil(length * self.retention)).astype(np.int64)
        if self.prefix_only:  # the first block has the most behind it
            tokens = np.maximum(tokens, np.floor(prompt * self.retention).astype(np.int64) + length - prompt)
        return tokens


@dataclass(frozen=True)
class PeriodicCache(NoCache):
    """dLLM-Cache: prompt and response have periods of refreshing; between, the most changed `transfer` share is (3.1).

    A step that refreshes neither finds the changed tokens by their new values, which are computed for the whole
    response: a projection that is left out of the tokens counted.
    """

    prompt_refresh: int = 50  # steps, K_p
    response_refresh: int = 7  # steps, K_r
    transfer: float = 0.25  # rho

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_refresh", "response_refresh"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0.0 <= self.transfer <= 1.0:
            raise PolicyError(f"transfer is {self.transfer}, expected 0 to 1")

    def work(self, at: Standing) -> Work:
        response = at.length - at.prompt
        changed = np.floor(self.transfer * response).astype(np.int64)
        of_prompt, of_response = at.step % self.prompt_refresh == 0, at.step % self.response_refresh == 0
        kinds = [of_prompt & of_response, of_response, of_prompt]
        phases = np.select(kinds, [Phase.FULL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT], Phase.PARTIAL)
        tokens = np.select(kinds, [at.length, response, at.prompt + changed], changed)
        whole = np.isin(phases, (Phase.FULL, Phase.REFRESH_PROMPT))
        keys = np.where(whole, at.length, self._prompt_keys(at.prompt) + response)
        return Work(phases.astype(np.uint8), tokens, keys)

    def head_rows(self, at: Standing, tokens: Ints) -> Ints:
        # The code projects everything every step; MaskKV what may still be masked.
        return at.length - (0 if self.logits == "all" else at.start)

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        # Keys, values, and the outputs of attention and feed-forward.
        return _runs(prompt) + _runs(length - prompt) + _runs(state * length)

    def _prompt_keys(self, prompt: Ints) -> Ints:
        """Keys of the prompt that steps between its refreshes see."""
        return prompt


@dataclass(frozen=True)
class MaskKV(PeriodicCache):
    """MaskKV on dLLM-Cache: each head keeps the keys of the prompt that masks vote for, `budget` of them on average.

    Votes are cast once, in the first step. Budgets of layers (beta, boundary) and heads (alpha) differ and add up
    to the same number, so that time depends on `budget` alone, and memory but for the runs begun (3.3, 3.4).
    """

    response_refresh: int = 5
    budget: int = 256  # prompt keys of a head, the mean over heads and layers
    alpha: float = 0.1  # of a layer's budget, the share that its heads divide equally
    beta: float = 0.4  # of the whole budget, the share that layers divide equally
    boundary: tuple[int, ...] = (0, -1)  # the layers whose importance is weighed apart

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < 1:
            raise PolicyError(f"budget is {self.budget}, expected at least 1")
        for name in ("alpha", "beta"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected 0 to 1")

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        # Every head of every layer fills its last run in part.
        kept = np.where(prompt <= self.budget, _runs(prompt), self.budget + RUN - 1)
        response = length - prompt
        return np.asarray(kept + _runs(response) + _runs(state * response), np.int64)

    def _prompt_keys(self, prompt: Ints) -> Ints:
        return np.minimum(prompt, self.budget)


Cache = ExactCache | NoCache


def _phases(at: Standing, phase: Phase) -> npt.NDArray[np.uint8]:
    return np.full(len(at.length), phase, np.uint8)


def _runs(tokens: Ints) -> Ints:
    """Tokens, rounded up to whole runs."""
    return -(-tokens // RUN) * RUN


def _check_logits(logits: str) -> None:
    if logits not in LOGITS:
        raise PolicyError(f"logits is {logits!r}, expected block or all")
