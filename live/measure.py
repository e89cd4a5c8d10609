"""Measure steps of a given shape through the serving loop, host time included."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.commits import CommitDraws, CommitModel
from ..engine.engine import Engine, Limits
from ..engine.journal import STEP_COLUMNS, RequestTable, StepRecorder
from ..engine.latency import Features
from ..engine.policies.ar import Autoregressive
from ..engine.policies.chunk import FixedChunk
from ..engine.policies.delayed_cache import DelayedCache
from ..engine.policies.whole_block import FixedBlock
from ..engine.policy import Policy, every_step, evicting_preset, parse
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from .executor import ModelExecutor
from .forward import Forward
from .loop import serve
from .prompts import Prompts, random_prompts
from .session import made_ready

SETTLE = 2  # steps before latencies count
MOST_STEPS = 64  # of a token or more, that sequences have pages for
PATIENT = CommitModel("one a step", 1, 0.9, None, (1e-9,))  # one mask a step: none passes the threshold


@dataclass(frozen=True, order=True)
class Shape:
    """`batch` sequences compute `window` positions each after `context` keys; window 0: prefill `context` tokens."""

    batch: int
    window: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * (self.window or self.context)

    def policy(self, block: int) -> Policy:
        limits = {
            "max_batch": self.batch,
            "max_prefill_tokens": max(block, self.batch * max(1, self.context)),
        }
        if self.window == 1:
            return every_step(limits, Autoregressive())
        if self.window in (0, block):
            return every_step(limits, FixedBlock(block))
        return every_step(limits, FixedChunk(self.window, block), DelayedCache())


@dataclass(frozen=True)
class Measured:
    """Steps of one shape: the middle one's features, and all times."""

    features: Features
    latency: npt.NDArray[np.float64]  # [steps], s
    device: npt.NDArray[np.float64]  # [steps], s


def measure(
    forward: Forward, shape: Shape, block: int, repeats: int, prompts: Prompts | None = None, settle: int = SETTLE,
    max_context: int | None = None, settled: float = 0.0,
) -> Measured:  # fmt: skip
    """Measure `repeats` steps of a shape; decode steps never compute `context`, a multiple of `block`.

    prompts: default random. settle: steps before counted ones. settled: s of decode steps before them, as pages
    suffice. max_context: decode contexts differ, up to this many tokens (`uneven`); None: all are the shape's.
    """
    assert shape.context % block == 0, f"context is {shape.context}, expected a multiple of {block}"
    policy = shape.policy(block)
    limits = Limits(1 << 20, 1 << 30, shape.batch)  # the cache limits pages
    num_steps = repeats + settle
    rounds = num_steps + 1 if shape.window == 0 else 1  # the first may be a capture
    output = 0 if shape.window == 0 else max((num_steps + 2) * block, MOST_STEPS + block)
    contexts = np.full(shape.batch * rounds, shape.context)
    if shape.window and max_context is not None:
        contexts = uneven(shape, block, max_context)
    requests = [Request(i, 0.0, context, output) for i, context in enumerate(contexts.tolist())]
    lengths = contexts, np.full(len(requests), output)
    drawn = policy.commits_by != "acceptance"
    draws = CommitDraws(PATIENT.for_block(policy.block_length), 0, *lengths, block) if drawn else None
    prompts = prompts or random_prompts(forward.model.config, 0)
    executor = _Contextual(forward, policy, prompts, draws, policy.batching.max_prefill_tokens, shape)
    if shape.window:
        executor.settle(settled, MOST_STEPS - num_steps)
    steps = _served(forward, executor, Engine(policy, limits, RequestTable(len(requests))), requests, num_steps)
    # A block's last step may be smaller.
    alike = (steps["prefill"] == (shape.window == 0)) & (steps["tokens"] == shape.tokens) & ~np.array(executor.late)
    counted = np.flatnonzero(alike)[-max(repeats, executor.measured - settle) :]
    features = features_at(steps, int(counted[len(counted) // 2]))
    return Measured(features, steps["latency"][counted], steps["device"][counted])


def uneven(shape: Shape, block: int, max_context: int) -> npt.NDArray[np.int64]:
    """Contexts spread evenly from half to one and a half times the shape's, as `max_context` allows.

    Attention takes longer for different sequences, as served, than for equal ones.
    """
    room = max(0, min(shape.context // 2, max_context - shape.context)) // block
    offsets = np.round(np.linspace(-room, room, shape.batch)).astype(np.int64)
    if shape.batch == 1:
        offsets[:] = 0
    return np.asarray(np.random.default_rng(0).permutation(shape.context + block * offsets), np.int64)


def measure_evicting(
    forward: Forward, batch: int, context: int, block: int, repeats: int, prompts: Prompts | None = None
) -> list[tuple[Features, Features, float]]:
    """Measure about `repeats` evicting steps: planned features, remaining features, latency (s).

    The model decides evictions and commits, after `context` keys never computed.
    """
    shape = Shape(batch, block, context)
    policy = evicting_policy(block, batch, context)
    requests = [Request(i, 0.0, context, (repeats + SETTLE) * block) for i in range(batch)]
    prompts = prompts or random_prompts(forward.model.config, 0)
    executor = _Contextual(forward, policy, prompts, None, policy.batching.max_prefill_tokens, shape)
    engine = Engine(policy, Limits(1 << 20, 1 << 30, batch), RequestTable(batch))
    steps = _served(forward, executor, engine, requests, repeats + SETTLE)
    triples = []
    for i in np.flatnonzero((steps["evicted"] > 0) & ~np.array(executor.late))[SETTLE:].tolist():
        planned = features_at(steps, i)
        tokens, qk_pairs, keys = (int(steps[name][i]) for name in ("evicted", "evicted_q_kv", "evicted_kv"))
        remaining = planned._replace(
            tokens=planned.tokens - tokens, sum_q_kv=planned.sum_q_kv - qk_pairs, sum_kv=planned.sum_kv - keys,
            head_rows=planned.head_rows - tokens, sampled_rows=planned.sampled_rows - tokens,
        )  # fmt: skip
        triples.append((planned, remaining, float(steps["latency"][i])))
    return triples


def fill_with_text(forward: Forward, prompts: Prompts, limit: int) -> None:
    """Fill the cache with one text of at most `limit` tokens, repeated: later steps then choose text's experts."""
    cache, block = forward.cache, forward.model.config.block_length
    page, unit = cache.page_size, math.lcm(cache.page_size, block)
    length = min(limit, cache.num_pages * page - 2 * unit) // unit * unit
    if length < unit:
        return
    numbers = cache.next_pages(length // page)
    measure(forward, Shape(1, 0, length), block, 1, prompts)
    for pages in (cache.keys, cache.values):
        text = pages[:, numbers].clone()
        for start in range(0, cache.num_pages, len(numbers)):
            piece = pages[:, start : start + len(numbers)]
            piece.copy_(text[:, : piece.shape[1]])


def evicting_policy(block: int, batch: int, context: int) -> Policy:
    """Prefills have `batch` sequences of `context` tokens."""
    # The executor samples only retained rows.
    return parse(
        f"{evicting_preset()},sample_block=false,block_length={block},max_batch={batch},"
        f"max_prefill_tokens={max(block, batch * context)}"
    )


def _served(
    forward: Forward, executor: "_Contextual", engine: Engine, requests: list[Request], num_steps: int
) -> dict[str, npt.NDArray[Any]]:
    """The journal of requests served until `num_steps` steps count."""
    parts: list[Mapping[str, Any]] = []
    recorder = StepRecorder(lambda columns, lists: parts.append(columns), engine.policy.block_length, batch=256)
    try:
        serve(engine, executor, requests, recorder=recorder, stop=lambda: executor.measured >= num_steps,
              meanwhile=forward.meanwhile)  # fmt: skip
    finally:
        forward.cache.clear()
    recorder.flush()
    return {name: np.concatenate([columns[name] for columns in parts]) for name in STEP_COLUMNS}


def features_at(steps: Mapping[str, npt.NDArray[Any]], i: int) -> Features:
    tokens, qk_pairs, keys, head, sampled, batch, forwards = (
        int(steps[name][i])
        for name in ("tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "batch", "num_forwards")
    )
    return Features(tokens, qk_pairs, keys, head, sampled, batch, tokens if steps["prefill"][i] else 0, forwards)


class _Contextual(ModelExecutor):
    """Skips prefills when decode steps are measured."""

    def __init__(self, *arguments: Any) -> None:
        *base, self._shape = arguments
        super().__init__(*base)
        self.measured = 0
        self.late: list[bool] = []  # by step: it compiled or captured
        self._until, self._max_steps = 0.0, 0  # s and steps that do not count
        self._settling: list[float] = []  # s

    def settle(self, seconds: float, num_steps: int) -> None:
        """Count no step in the first `seconds` or `num_steps` steps, whichever end first."""
        self._until, self._max_steps = seconds, num_steps

    def step(self, plan: StepPlan) -> StepOutcome:
        if plan.prefill and self._shape.window:
            self._open(plan, plan.num_tokens.astype(np.int64))
            self.late.append(False)
            return StepOutcome(0.0, np.full_like(plan.window, self._policy.rows.commits == "tokens"))
        # Evicting steps count at any size.
        evicts = self._policy.eviction.by_importance
        counts = plan.evicting is not None if evicts else plan.features.tokens == self._shape.tokens
        ready = made_ready(self._forward)
        outcome = super().step(plan)
        self.late.append(made_ready(self._forward) > ready)
        if counts and not self.late[-1]:
            if sum(self._settling) < self._until and len(self._settling) < self._max_steps:
                self._settling.append(outcome.latency)
            else:
                self.measured += 1
        return outcome


def shapes(block: int, most_batch: int, most_tokens: int, most_context: int, page: int, num_pages: int) -> list[Shape]:
    """All shapes within these limits, smallest first: powers of two and the middles between."""
    contexts = sorted({max(block, c // block * block) for c in _powers(block, most_context)})
    windows = [w for w in _powers(1, block) if w <= block]
    grid = set()
    for batch in _powers(1, most_batch):
        for context in contexts:
            if batch * pages_of(context, block, page) > num_pages:
                continue
            if batch * context <= most_tokens:
                grid.add(Shape(batch, 0, context))
            grid |= {Shape(batch, w, context) for w in windows if batch * w <= most_tokens}
    return sorted(grid, key=lambda s: (s.tokens, s))


def level_shapes(block: int, most_batch: int, most_tokens: int, most_context: int, tokens: list[int]) -> list[Shape]:
    """A decode shape and a prefill of each token count, if possible, smallest first.

    Decode shapes have one block of context: they measure the layers.
    """
    candidates = set()
    for n in tokens:
        for batch in (b for b in range(1, min(most_batch, n) + 1) if n % b == 0 and n // b <= block):
            candidates.add(Shape(batch, n // batch, block))
            break  # fewest sequences
        for batch in (b for b in range(1, most_batch + 1) if n % (b * block) == 0 and n // b <= most_context):
            candidates.add(Shape(batch, 0, n // batch))
            break
    return sorted((s for s in candidates if s.tokens <= most_tokens), key=lambda s: (s.tokens, s))


def pages_of(context: int, block: int, page: int) -> int:
    """Most pages of a measured sequence; one is spare, for uneven batches."""
    return -(-(context + 2 * block + MOST_STEPS) // page) + 1


def _powers(first: int, last: int) -> list[int]:
    """first, 1.5 first, 2 first, 3 first, 4 first ... and last."""
    values = []
    while first < last:
        values += [first, 3 * first // 2]
        first *= 2
    return sorted({*(v for v in values if v < last), last})
