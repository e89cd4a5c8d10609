"""Full-sequence policies served on a device under watch: what each step committed, and whose every page is."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live import session
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.device_loop import serve
from dsim.live.full_sequence import FullSequenceExecutor
from dsim.live.model import Decoder
from dsim.live.prompts import Prompts, random_prompts
from dsim.live.weights import random_model

from ..worlds import Collector
from .dense import SMALL

Commits = list[dict[int, int]]  # a step's: position -> token
# Prompt and output: prompts shorter than a block, outputs of whole blocks, of part of one, of none. Without a prompt
# all positions would look alike at first, and the most confident be a matter of rounding.
LENGTHS = [(2, 6), (1, 4), (9, 11), (23, 16), (40, 3), (5, 0), (12, 8), (30, 26)]
PROMPTS = random_prompts(SMALL, 7)


def policy_of(spec: str) -> Policy:
    return parse(spec + ",page_size=8" + ("" if "block_length" in spec else ",block_length=4"))


def decoder(config: ModelConfig = SMALL) -> Decoder:
    """A decoder of random weights whose confidences are of every size."""
    model = random_model(config, "cpu", torch.float32, seed=1)
    with torch.no_grad():  # and attention that has a say in them
        model.embedding.weight.mul_(10.0)
        model.head.weight.mul_(20.0)
        for layer in model.layers:
            layer.q_norm.weight.mul_(3.0)
            layer.output.weight.mul_(20.0)
    return model


served_by = cache(decoder)  # one that nobody changes


@dataclass
class Run:
    """Requests that were served, the engine that planned it, and how it was made."""

    engine: Engine
    journal: Collector
    how: dict[str, Any]

    @property
    def table(self) -> RequestTable:
        return self.engine.table

    def differences(self) -> list[str]:
        """What a fresh engine says of the journal."""
        table, journal = RequestTable(len(self.table["request"])), self.journal
        fresh = Engine(self.engine.policy, self.engine.limits, table, **self.how)
        return list(replay(fresh, 0, self.table.columns, journal.steps, journal.lists))


def serve_all(executor: Any, policy: Policy, limits: Limits, requests: list[Request], **how: Any) -> Run:
    """Serve requests on an engine of these settings: every one to its end, or it fits no pool."""
    table, journal = RequestTable(max(r.index for r in requests) + 1), Collector()
    recorder = StepRecorder(journal, policy.width)
    engine = Engine(policy, limits, table, **how)
    serve(engine, executor, requests, recorder=recorder)
    recorder.flush()
    return Run(engine, journal, how)


class Texts:
    """An executor that serves requests to their ends and keeps their texts, as each one's last step left it."""

    def __init__(
        self, model: Any, policy: Policy, lengths: list[tuple[int, int]], limits: Limits, prompts: Prompts = PROMPTS,
        engine: dict[str, Any] | None = None, **serving: Any,
    ) -> None:  # fmt: skip
        requests = [Request(i, 0.0, *of_request) for i, of_request in enumerate(lengths)]
        served = session.Serving(model, policy, limits, prompts, **serving)
        self.forward: Any = served.forward(requests)
        self.executor = served.executor(self.forward)
        self.texts: dict[int, list[int]] = {}
        self.done = serve_all(self, policy, limits, requests, **(engine or {}))
        assert (self.done.table["status"] == 0).all()
        assert self.done.differences() == []

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.step(plan)
        for request, slot, end in zip(plan.requests.tolist(), plan.slots.tolist(), plan.end.tolist(), strict=True):
            self.texts[request] = self.executor.text(request, slot, end).tolist()
        return outcome


class Watched:
    """An executor that says what each request's steps committed, and whether its pages are those accounted for."""

    def __init__(self, executor: FullSequenceExecutor, cache: PagedCache, poison: bool = False) -> None:
        self.executor, self.cache, self.poison = executor, cache, poison
        self.commits: dict[int, Commits] = {}
        self.phases: list[tuple[int, ...]] = []

    def step(self, plan: StepPlan) -> StepOutcome:
        if self.poison:
            self.spoil()
        outcome = self.executor.step(plan)
        self.phases.append(tuple(plan.phases.tolist()))
        used = self.cache.num_pages - self.cache.num_free
        # Hidden states take pages in the engine's account alone.
        assert used == plan.pages or (used < plan.pages and self.executor._rule.keeps_outputs)
        for i, request in enumerate(plan.requests.tolist()):
            text = self.executor.text(request, int(plan.slots[i]), self.executor._tokens.shape[1])
            at = int(plan.block_start[i]) + np.flatnonzero(outcome.committed[i])
            self.commits.setdefault(request, []).append({int(p): int(text[p]) for p in at})
        return outcome

    def spoil(self) -> None:
        """NaN wherever nothing is kept for a later step."""
        free = sorted(set(range(self.cache.num_pages)) - set(self.cache.table[self.cache.table >= 0].tolist()))
        for pages, every in ((self.cache.keys, self.cache.all_keys), (self.cache.values, self.cache.all_values)):
            pages[:, free] = float("nan")
            every[self.cache.scratch :] = float("nan")


def run(
    policy: Policy, lengths: list[tuple[int, int]], *, indices: list[int] | None = None, poison: bool = False,
    config: ModelConfig = SMALL, model: Decoder | None = None,
) -> Watched:  # fmt: skip
    """Serve requests, every one to its end; `indices`: what they are called, which says what they ask."""
    indices = indices or list(range(len(lengths)))
    requests = [Request(i, 0.0, *of_request) for i, of_request in zip(indices, lengths, strict=True)]
    limits = Limits(200, 256, policy.batching.max_batch or 4, state_tokens=config.state_tokens)
    serving = session.Serving(model or served_by(config), policy, limits, PROMPTS)
    forward: Any = serving.forward(requests)
    executor = serving.executor(forward)
    assert isinstance(executor, FullSequenceExecutor)
    watched = Watched(executor, forward.cache, poison)
    assert (serve_all(watched, policy, limits, requests).table["status"][indices] == 0).all()
    return watched
