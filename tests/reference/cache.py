"""Oracle of full-sequence caches: what each step computes and sees, and what requests hold, for whole batches."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import NoCache
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.rows.passes import RowPosition, Work
from dsim.engine.step import Phase

Ints = npt.NDArray[np.int64]
RUN = 16  # keys: where heads keep different ones, each head's lie in runs of so many


def work(cache: Any, at: RowPosition) -> Work:
    """What the next step of each request does (full-sequence-diffusion.md 1 to 4)."""
    if isinstance(cache, PeriodicCache):
        return _periodic(cache, at)
    if isinstance(cache, SparseCache):
        phases = np.where(at.block_step < cache.delay, Phase.FULL, Phase.PACK)
        reuse = at.block_step > cache.delay
        return Work(
            np.where(reuse, Phase.REUSE, phases).astype(np.uint8),
            np.where(reuse, at.block, at.length),
            np.where(reuse, kept(cache, at) + at.block, at.length),
        )
    if isinstance(cache, FastCache):
        full = at.block_step == 0
        tokens = np.full_like(at.length, at.block) if cache.reuse == "dual" else at.length - at.start
        phases = np.where(full, Phase.FULL, Phase.REUSE)
        return Work(phases.astype(np.uint8), np.where(full, at.length, tokens), at.length)
    assert type(cache) is NoCache
    return Work(np.full(len(at.length), Phase.FULL, np.uint8), at.length, at.length)


def _periodic(cache: PeriodicCache, at: RowPosition) -> Work:
    response = at.length - at.prompt
    changed = np.floor(cache.transfer * response).astype(np.int64)
    of_prompt, of_response = at.step % cache.prompt_refresh == 0, at.step % cache.response_refresh == 0
    kinds = [of_prompt & of_response, of_response, of_prompt]
    phases = np.select(kinds, [Phase.FULL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT], Phase.PARTIAL)
    tokens = np.select(kinds, [at.length, response, at.prompt + changed], changed)
    seen = np.minimum(at.prompt, cache.budget) if isinstance(cache, MaskKV) else at.prompt
    whole = np.isin(phases, (Phase.FULL, Phase.REFRESH_PROMPT))
    return Work(phases.astype(np.uint8), tokens, np.where(whole, at.length, seen + response))


def kept(cache: SparseCache, at: RowPosition) -> Ints:
    """Keys outside the block that reuse steps see."""
    outside = at.length - at.block
    candidates = at.start if cache.prefix_only else outside
    chosen = np.minimum(candidates, np.maximum(cache.at_least, np.floor(candidates * cache.retention)))
    return np.asarray(chosen, np.int64) + (outside - candidates)


def head_rows(cache: NoCache, at: RowPosition, tokens: Ints) -> Ints:
    """Rows through the LM head of a step that computes so many tokens."""
    if isinstance(cache, PeriodicCache):  # the code projects everything every step; MaskKV what may still be masked
        return at.length - (0 if cache.logits == "all" else at.start)
    return tokens if cache.logits == "all" else np.minimum(tokens, at.block)


def held(cache: Any, prompt: Ints, length: Ints, state: int) -> Ints:
    """Tokens' worth of keys and values that requests hold while they run; `state`: of a token's other outputs."""
    response = length - prompt
    if isinstance(cache, MaskKV):  # every head of every layer fills its last run in part
        of_prompt = np.where(prompt <= cache.budget, _runs(prompt), cache.budget + RUN - 1)
        return np.asarray(of_prompt + _runs(response) + _runs(state * response), np.int64)
    if isinstance(cache, PeriodicCache):
        return _runs(prompt) + _runs(response) + _runs(state * length)
    if isinstance(cache, SparseCache):
        tokens: Ints = np.maximum(max(1, cache.at_least), np.ceil(length * cache.retention)).astype(np.int64)
        if cache.prefix_only:  # the first block has the most behind it
            tokens = np.maximum(tokens, np.floor(prompt * cache.retention).astype(np.int64) + response)
        return tokens
    return length if isinstance(cache, FastCache) else np.zeros_like(length)


def _runs(tokens: Ints) -> Ints:
    """Tokens, rounded up to whole runs."""
    return -(-tokens // RUN) * RUN
