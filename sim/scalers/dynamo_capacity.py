"""Dynamo's capacity of a replica: requests/s of the best batch within its SLAs, and the budget of GPUs.

`perf_model/engine_query.py` and `core/budget.py` of Dynamo 1.6.1.
"""

import math
from collections.abc import Iterator, Sequence
from math import nan
from typing import NamedTuple

from .perf_model import MOST_CANDIDATES, PerfModel, clamped
from .scaler import PoolView


class Work(NamedTuple):
    """Expected requests, in whole tokens."""

    prompt: int
    answer: int
    hit_rate: float = 0.0  # share of the prompt in a prefix cache

    @property
    def prefill(self) -> int:
        """Computed prompt tokens."""
        return max(1, math.ceil(self.prompt * (1 - clamped(self.hit_rate))))

    @property
    def context(self) -> int:
        """Tokens of a half-done request."""
        return max(1, self.prompt + self.answer // 2)


def capacity(model: PerfModel, pool: PoolView, work: Work, ttft: float, itl: float) -> float:
    """Requests/s of a replica within both SLAs (s), or its most if none is; NaN: unknown.

    Forwards of a prefill-only pool hold only prompts, those of a decode-only pool only answers.
    """
    best, best_ok = nan, False
    for rps, ok in _batches(model, pool, work, ttft, itl):
        if best != best or (ok, rps) > (best_ok, best):
            best, best_ok = rps, ok
    return best


def _batches(model: PerfModel, pool: PoolView, work: Work, ttft: float, itl: float) -> Iterator[tuple[float, bool]]:
    """Each batch's requests/s, and whether it meets the SLAs."""
    accepted = max(1.0, pool.tokens_per_forward) if pool.tokens_per_forward == pool.tokens_per_forward else 1.0
    most, kv_tokens = pool.max_prefill, pool.num_pages // max(1, pool.ready) * pool.page_size
    if pool.role == "prefill":
        for n in _sizes(1 if work.prefill > most else min(pool.max_batch, most // work.prefill)):
            took = _chunks(model, n * work.prefill, most, 0.0)
            yield n / took, took <= ttft
        return
    limit = min(pool.max_batch, kv_tokens // work.context)
    for n in _sizes(limit if pool.role == "decode" else min(limit, max(1, most - 1))):
        kv, prefill = float(n * work.context), math.ceil(n * accepted * work.prefill / max(1, work.answer))
        if pool.role == "decode":
            prefill = 0
        elif prefill > most - n:
            continue
        token = model.time(prefill, kv) / accepted
        first = 0.0 if pool.role == "decode" else _chunks(model, prefill + work.prefill, most, kv)
        yield n / (work.answer * token), token <= itl and first <= ttft


def _sizes(most: int) -> list[int]:
    """At most MOST_CANDIDATES batches from 1 to `most`, evenly spread."""
    if most <= MOST_CANDIDATES:
        return list(range(1, most + 1))
    return [1 + i * (most - 1) // (MOST_CANDIDATES - 1) for i in range(MOST_CANDIDATES)]


def _chunks(model: PerfModel, tokens: int, most: int, kv: float) -> float:
    """Seconds of a prefill in chunks of at most `most` tokens."""
    full, rest = divmod(tokens, most)
    return full * model.time(most, kv) + (model.time(rest, kv) if rest else 0.0)


def within_budget(targets: Sequence[int], pools: Sequence[PoolView], budget: int, least: int) -> list[int]:
    """Targets within a budget of GPUs: two pools shrink in proportion, others take their shares.

    If all minima exceed the budget, each pool gets its minimum.
    """
    total = sum(target * pool.gpus for target, pool in zip(targets, pools, strict=True))
    if total <= budget:
        return list(targets)
    left, found = budget, []
    for i, (target, pool) in enumerate(zip(targets, pools, strict=True)):
        later = least * sum(other.gpus for other in pools[i + 1 :])  # the later pools' minimum
        share = left // pool.gpus if i == len(pools) - 1 else math.floor(target * budget / total)
        found.append(max(least, min(share, (left - later) // pool.gpus)))
        left -= found[-1] * pool.gpus
    return found
