"""Requests that end at an EOS, beside the same requests that do not: the same tokens, up to and with the first EOS."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.engine.request import Request
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live import session
from dsim.live.executor import ModelExecutor
from dsim.live.prompts import random_prompts
from dsim.live.sampling import Sampling
from dsim.live.weights import random_model

from .dense import SMALL
from .test_executor import LATENCY
from .watched import Run, serve_all

LENGTHS = [(1, 19), (5, 13), (8, 16), (13, 1), (40, 12), (3, 20), (17, 25), (2, 16), (4, 0)]
EOS = tuple(range(0, SMALL.vocab, 9))
SPECS = [
    "lmdeploy-bd32", "sglang-bd32", "chunk:3", "chunk:3,obs=true", "delayed-cache", "focus",
    "lmdeploy-bd32,num_loops=3", "ar", "ar,decide_ahead=true",
]  # fmt: skip


class Listening:
    """Keeps the text of each request as its last step left it."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self.texts: dict[int, list[int]] = {}

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.step(plan)
        for request, slot, end in zip(plan.requests.tolist(), plan.slots.tolist(), plan.end.tolist(), strict=True):
            self.texts[request] = self.executor.text(request, slot, end).tolist()
        return outcome


def run(policy: Policy, eos: tuple[int, ...], emit: str = "block", num_pages: int = 200) -> tuple[Listening, Run]:
    model = random_model(SMALL, "cpu", torch.float32, seed=1)
    with torch.no_grad():
        model.embedding.weight.mul_(40.0)
    requests = [Request(i, 0.0, p, o) for i, (p, o) in enumerate(LENGTHS)]
    limits = Limits(num_pages, 256, 4)
    # Without chance every token is the same.
    serving = session.Serving(model, policy, limits, random_prompts(SMALL, 7), sampling=Sampling(4.0), eos=eos)
    forward: Any = serving.forward(requests)
    listening = Listening(serving.executor(forward))
    done = serve_all(listening, policy, limits, requests, latency=LATENCY, emit=emit)
    assert forward.cache.num_free + len(forward.cache.table[forward.cache.table >= 0]) == forward.cache.num_pages
    return listening, done


def policy_of(spec: str) -> Policy:
    blocks = "" if spec.startswith("ar") else ",block_length=4"
    return parse(f"{spec},max_batch=4,page_size=8,max_prefill_tokens=24{blocks}")


@cache
def whole(spec: str) -> dict[int, list[int]]:
    """The texts of requests that no EOS ends."""
    return run(policy_of(spec), ())[0].texts


def expected(policy: Policy, text: list[int], prompt: int, output: int) -> int:
    """Tokens of an answer of `text`, by the rule as it is told."""
    seen = prompt
    if policy.rows.commits == "masks" and prompt % policy.block_length:
        seen = -(-prompt // policy.block_length) * policy.block_length
    ends = [i + 1 - prompt for i in range(seen, prompt + output) if text[i] in EOS]
    return ends[0] if ends else output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "emit"), [*((spec, "block") for spec in SPECS), *product(("chunk:3,obs=true", "focus"), ("step", "end"))]
)
def test_a_request_ends_at_its_first_eos_and_its_journal_replays(spec: str, emit: str) -> None:
    policy, texts = policy_of(spec), whole(spec)
    listening, done = run(policy, EOS, emit)
    table, engine = done.table, done.engine
    wanted = [expected(policy, texts[i], *lengths) for i, lengths in enumerate(LENGTHS)]
    assert table["num_tokens"].tolist() == wanted
    assert sum(n < o for n, (_, o) in zip(wanted, LENGTHS, strict=True)) >= 3
    for i, (prompt, _) in enumerate(LENGTHS):
        assert listening.texts[i][: prompt + wanted[i]] == texts[i][: prompt + wanted[i]]
    assert (table["status"] == 0).all()
    assert engine.outstanding_tokens == engine.pages_held == 0
    assert done.differences() == []
