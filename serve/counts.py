"""Counts a replica's steps and replies for its page of metrics."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ..engine.engine import Engine
from ..engine.prefix import Prefixes, caches_prefixes
from ..engine.step import StepOutcome, StepPlan
from ..results.engine_metrics import QUANTITIES, edges_of


class Buckets:
    """Counts of values per bucket: above the edge before, up to its own."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def cumulative(self) -> list[int]:
        """Values up to each edge, then all."""
        return list(accumulate(self.counts.copy()))


@dataclass(eq=False)
class Watch:
    """Counts of one replica. Its thread calls `begun`, `sent` and `step`; others read.

    counts: by quantity. finished: requests by the reason of their end. histograms: those that the engine publishes.
    """

    engine_name: str
    engine: Engine
    prefixes: Prefixes | None
    host: Callable[[StepPlan], float] | None  # s of a step in which the device waits; None: as the step's outcome says

    def __post_init__(self) -> None:
        name, engine, prefixes = self.engine_name, self.engine, self.prefixes
        self._cached = np.zeros(0, np.int64)  # prompt tokens, by request
        if prefixes is not None and caches_prefixes(engine.policy):
            self._cached = prefixes.cached
        # SGLang's synchronous rounds report at the end of their blocks.
        self._every_forward = getattr(engine.policy.batching, "dllm_fdfo", True)
        counted = ("prompt_tokens", "cached_tokens", "generation_tokens", "forward_seconds", "forwards")
        self.counts: dict[str, float] = dict.fromkeys(counted, 0.0)
        self.finished = {"stop": 0, "length": 0}
        self.histograms = {
            quantity.name: Buckets(edges_of(name, quantity.name, engine.limits.context_limit))
            for quantity in QUANTITIES
            if quantity.kind == "histogram" and quantity.name_in(name)
        }

    def begun(self, request: int, due: float) -> None:
        """A request's first step; it reached the engine at `due` (s)."""
        self._observe("queue", float(self.engine.table["scheduled"][request]) - due)

    def sent(self, request: int, num: int, *, first: bool, last: bool, gap: float, output_length: int) -> int:
        """Count `num` tokens sent to a client, `gap` s after those before; returns the prompt tokens computed first."""
        table = self.engine.table
        prompt = int(table["input_length"][request])
        cached = int(self._cached[request : request + 1].sum())
        self.counts["generation_tokens"] += num
        if first:
            self._observe("ttft", float(table["first_emission"][request] - table["arrival"][request]))
            self.counts["prompt_tokens"] += prompt
            self.counts["cached_tokens"] += cached
        elif num:
            self._observe("gap", gap)
            self._observe("gap_per_token", gap / num)
            self._observe("gap_of_each_token", gap / num, times=num)
        if last:
            self._end(request, prompt, output_length)
        return first * (prompt - cached)

    def _end(self, request: int, prompt: int, output_length: int) -> None:
        table = self.engine.table
        num = int(table["num_tokens"][request])
        times = ("arrival", "scheduled", "first_emission", "finish")
        arrival, begin, first, end = (float(table[name][request]) for name in times)
        self.finished[("length", "stop")[num < output_length]] += 1
        values = {"input_length": prompt, "output_length": num, "longest_output": num, "e2el": end - arrival}
        values |= {"prefill": first - begin, "decode": end - first, "tpot": (end - first) / max(1, num - 1)}
        for quantity, value in values.items():
            self._observe(quantity, value)

    def step(self, plan: StepPlan, outcome: StepOutcome, num_sent: int, num_prompt: int) -> None:
        """Count a finished step. num_sent: tokens. num_prompt: prompt tokens, computed for replies that began."""
        if num_sent:
            self._observe("iteration_tokens", num_sent + num_prompt)
        if self.host is not None:
            host = min(outcome.latency, self.host(plan))
        else:
            host = float(np.nan_to_num(outcome.latency - outcome.device))
        self.counts["forward_seconds"] += outcome.latency - host
        if self._every_forward or plan.prefill or num_sent:
            self.counts["forwards"] += 1

    def _observe(self, quantity: str, value: float, times: int = 1) -> None:
        if quantity in self.histograms:
            self.histograms[quantity].add(value, times)
