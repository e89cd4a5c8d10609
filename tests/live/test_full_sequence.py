"""Full-sequence policies on a device against a plain executor: one request at a time, whole tensors, no pages.

The families' published loops, written plainly, against what the executor answers: shifted rows, predicted masks.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.engine.engine import Limits
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import NoCache
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live.full_sequence import pages_of_use
from dsim.live.model import Decoder
from dsim.live.weights import random_model
from dsim.research.tiny.saved import save_model
from dsim.results.run import read_run

from ..checks import cases
from ..cli.command import succeed
from ..reference import pooled_topk
from .dense import SMALL, Dense, logits, save_profile
from .plain_periodic import PlainLoop
from .watched import LENGTHS, PROMPTS, Commits, Texts, decoder, policy_of, run

SETTINGS = [
    "vanilla",
    "vanilla,logits=block,denoising_steps=3",
    "vanilla,strategy=low_confidence_dynamic,threshold=0.6",
    "fast-dllm",
    "fast-dllm,logits=block,block_length=8",
    "fast-dllm:prefix,block_length=8",
    "fast-dllm:prefix,strategy=low_confidence_dynamic,threshold=0.6",
    "sparse-dllm:0.3",
    "sparse-dllm:0.5,pool_width=1",
    "sparse-dllm:0.5,block_length=8,denoising_steps=6",
    "sparse-dllm:0.3,head_centric=true,logits=block",
    "sparse-dllm:0.5,head_centric=true,pool_width=5",
    "sparse-dllm:1.0",
    "sparse-dllm:0.5,strategy=low_confidence_dynamic,threshold=0.6",
]
SERVED = ",max_batched_tokens=90,page_size=8,block_length=4"


class Plain(PlainLoop):
    """The published loops as their specification tells them, for one request (full-sequence-diffusion.md 1, 2, 4.2)."""

    seen: list[tuple[Tensor, Tensor]]  # of each layer, keys and values that later steps of the block see

    def logits(self, text: list[int], start: int, step: int) -> Tensor:
        first, rows = self.rows(text, start, step)
        return rows[start - first :][: self.block]

    def rows(self, text: list[int], start: int, step: int) -> tuple[int, Tensor]:
        """The first position that a step computes, and the logits of all of them."""
        rule, length = self.policy.cache, len(text)
        if type(rule) is NoCache or step <= isinstance(rule, SparseCache):
            made: list[tuple[Tensor, Tensor]] = []

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                made.append(self.keep(rule, q, k, v, start))
                return Dense(torch.ones(length, length, dtype=torch.bool))(layer, q, k, v)

            hidden = self.model(torch.tensor(text), torch.arange(length), attend)
            self.seen = made
            return 0, self.model.logits(hidden)
        seen = self.seen
        last = length if isinstance(rule, FastCache) and rule.reuse == "prefix" else start + self.block
        at = torch.arange(start, last)

        def attend_cached(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if isinstance(rule, FastCache):
                seen[layer][0][at], seen[layer][1][at] = k, v
                keys, values = seen[layer]
            else:
                keys, values = torch.cat([seen[layer][0], k]), torch.cat([seen[layer][1], v])
            return Dense(torch.ones(len(q), len(keys), dtype=torch.bool))(layer, q, keys, values)

        hidden = self.model(torch.tensor(text[start:last]), at, attend_cached)
        return start, self.model.logits(hidden)

    def keep(self, rule: Any, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """What of a full pass's keys and values reuses see."""
        if not isinstance(rule, SparseCache):
            return k.clone(), v.clone()
        outside = [j for j in range(len(k)) if not start <= j < start + self.block]
        mean = q[start : start + self.block].mean(0)  # [H, D]
        per_head = k[outside].repeat_interleave(q.shape[1] // k.shape[1], 1)  # [candidates, H, D]
        scores = (mean * per_head).sum(-1).T.numpy()
        merged = pooled_topk.merged(scores, k.shape[1], not rule.head_centric)
        num = pooled_topk.num_kept(len(outside), rule.retention, rule.at_least)
        chosen = np.array(outside, np.int64)[pooled_topk.kept(merged, num, rule.pool_width)]  # [heads, num]
        index = torch.from_numpy(np.broadcast_to(chosen, (k.shape[1], num)).copy())
        heads = torch.arange(k.shape[1])[:, None]
        return k[index, heads].transpose(0, 1), v[index, heads].transpose(0, 1)


def plainly(policy: Policy) -> dict[int, Commits]:
    plain = Plain(decoder(), policy)
    return {i: plain.serve(PROMPTS(i, p).tolist(), o) for i, (p, o) in enumerate(LENGTHS)}


@cache
def served(spec: str) -> dict[int, Commits]:
    """What the executor commits of all requests."""
    return run(policy_of(spec), LENGTHS).commits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SETTINGS)
def test_whole_requests_commit_what_a_plain_executor_commits(spec: str) -> None:
    assert served(spec) == plainly(policy_of(spec))


@pytest.mark.parametrize("rule", [SparseCache(), SparseCache(head_centric=True), FastCache(), NoCache()])
def test_requests_multiplexed_commit_what_a_plain_executor_commits(rule: NoCache) -> None:
    policy = replace(parse("dllm-serve" + SERVED), cache=rule)
    watched = run(policy, LENGTHS)
    assert max(len(set(phases)) for phases in watched.phases) == (1 if type(rule) is NoCache else 2)
    assert watched.commits == plainly(policy)


def test_what_nobody_wrote_is_never_seen() -> None:
    for spec in ("vanilla", "fast-dllm", "sparse-dllm:0.3"):
        assert run(policy_of(spec), LENGTHS, poison=True).commits == served(spec)
    policy = parse("dllm-serve" + SERVED)
    assert run(policy, LENGTHS, poison=True).commits == plainly(policy)


def test_scratch_pages_are_one_layers_and_as_many_as_the_largest_step_takes() -> None:
    requests = [Request(i, 0.0, 30, 10) for i in range(20)]  # 42 tokens: 6 pages, of which sparsely 3
    for spec, expected in [
        ("vanilla", (0, 6)), ("fast-dllm", (6, 0)), ("sparse-dllm", (3, 6)), ("dllm-serve,max_batch=5", (15, 30)),
        ("dllm-serve,max_batched_tokens=80", (60, 30)), ("dllm-serve,num_pages=50", (50, 120)),
        # In runs of 16: 8 + 15 of the prompt, 16 of the rest, and the prompt apart.
        ("maskkv:8", (5, 8)),
    ]:  # fmt: skip
        policy = parse(spec + ",page_size=8,block_length=4")
        limits = Limits(policy.memory.num_pages or 1000, 256, policy.batching.max_batch or 1)
        assert pages_of_use(policy, limits, requests) == expected


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of requests that come at once, a model of random weights, and profiles of both families of it."""
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": 0, "input_length": 9 + 5 * i, "output_length": 4 + 3 * i} for i in range(6)]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(random_model(SMALL, "cpu", torch.float32), Path("model"), torch.float32)
    for name, known in (("ours", "rtx4090-48gb-llada-8b"), ("other", "h200-sdar-8b")):
        save_profile(SMALL, known, name)


@pytest.mark.usefixtures("files")
@cases(
    "spec",
    "fast-dllm,denoising_steps=3,block_length=4",
    "maskkv:6,denoising_steps=3,block_length=4,prompt_refresh=9",
    "dllm-serve,denoising_steps=3" + SERVED,
)
def test_random_weights_do_what_the_twin_predicts_step_by_step(spec: str) -> None:
    both = ["trace.jsonl", "--profile", "ours.json", "--policy", spec]
    succeed("live", *both, "--model", "model", "--commits", "twin", "-o", "measured")
    succeed("replay", *both, "-o", "predicted")
    mine, theirs = (read_run(name).steps(spec) for name in ("measured", "predicted"))
    for column in ("batch", "tokens", "sum_q_kv", "sum_kv", "head_rows", "committed", "pages"):
        assert mine[column].tolist() == theirs[column].tolist()
    assert mine["committed"].sum() == sum(-(-(4 + 3 * i) // 4) * 4 for i in range(6))


SHIFTED = replace(SMALL, shifted=True)
DREAM = replace(SHIFTED, by_entropy=True)
ANSWERS = [(9, 11), (8, 16), (12, 3), (23, 16), (3, 9), (16, 8)]
BLOCK = 4


class Dream(Plain):
    """The published loop by blocks: a row predicts the position behind its own, and the least doubtful commit (1.2)."""

    def logits(self, text: list[int], start: int, step: int) -> Tensor:
        first, rows = self.rows(text, start, step)
        rows = torch.cat([rows[:1], rows[:-1]])[start - first :][:BLOCK]
        self.doubt = dict(enumerate(torch.distributions.Categorical(logits=rows).entropy().tolist(), start))
        return rows

    def choose(self, best: dict[int, float], masks: set[int], step: int) -> set[int]:
        steps = self.policy.unmasking.denoising_steps or BLOCK
        if step == 0 and isinstance(self.policy.cache, FastCache):
            return {min(masks)}  # with a cache a block's first pass commits its first position alone
        order = sorted(masks, key=lambda p: (self.doubt[p], p))
        time = [1 - i * (1 - 1e-3) / steps for i in range(steps + 1)]
        return set(order if step == steps - 1 else order[: int(len(order) * (1 - time[step + 1] / time[step]))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "spec", ["vanilla", "vanilla,logits=block", "fast-dllm", "fast-dllm:prefix", "fast-dllm,logits=block"]
)
@pytest.mark.parametrize(("steps", "strategy"), [(4, ""), (3, ""), (3, ",strategy=entropy")])
def test_dream_answers_as_its_published_loop(spec: str, steps: int, strategy: str) -> None:
    # The schedule is the checkpoint's, or the policy's, whatever the checkpoint is.
    config = SHIFTED if strategy else DREAM
    model = decoder(config)
    with torch.no_grad():  # a mask is never predicted: the published loops would go on for ever
        model.head.weight[config.mask_token] = 0.0
    policy = parse(f"{spec},denoising_steps={steps},block_length={BLOCK},page_size=8{strategy}")
    watched = run(policy, ANSWERS, config=config, model=model)
    for i, (p, o) in enumerate(ANSWERS):
        assert watched.commits[i] == Dream(model, policy).serve(PROMPTS(i, p).tolist(), o), i
        if strategy:  # and the twin's steps commit as many
            quotas = policy.unmasking.quotas(policy)
            assert [len(step) for step in watched.commits[i]] == quotas * -(-o // BLOCK)


@torch.no_grad()
def llada(model: Decoder, prompt: list[int], output: int, steps: int) -> tuple[list[int], int]:
    """The published loop: whatever a step predicts is put where it was chosen, be it the mask; and masks so left."""
    mask, left = model.config.mask_token, 0
    text = prompt + [mask] * (-(-output // BLOCK) * BLOCK)
    for start in range(len(prompt), len(text), BLOCK):
        for step in range(steps):
            masks = [p for p in range(start, start + BLOCK) if text[p] == mask]
            if masks:
                seen = torch.ones(len(text), len(text), dtype=torch.bool)
                rows = model.logits(model(torch.tensor(text), torch.arange(len(text)), Dense(seen)))
                best, token = rows[start : start + BLOCK].softmax(-1).max(-1)
                order = sorted(masks, key=lambda p: (-float(best[p - start]), p))
                for p in order[: BLOCK // steps + (step < BLOCK % steps)]:  # LLaDA's linear schedule
                    text[p] = int(token[p - start])
        left += text[start : start + BLOCK].count(mask)
    return text[: len(prompt) + output], left


@pytest.mark.parametrize("steps", [4, 3, 1])
def test_llada_answers_as_its_published_loop_where_masks_are_predicted(steps: int) -> None:
    model = decoder(SMALL)
    with torch.no_grad():  # the mask is likeliest in places
        model.head.weight[SMALL.mask_token] *= 2.0
    policy = parse(f"vanilla,denoising_steps={steps},block_length={BLOCK},page_size=8")
    watched = run(policy, ANSWERS, model=model)
    predicted = 0
    for i, (p, o) in enumerate(ANSWERS):
        said = {at: token for step in watched.commits[i] for at, token in step.items()}
        expected, left = llada(model, PROMPTS(i, p).tolist(), o, steps)
        predicted += left
        assert [said[at] for at in range(p, p + o)] == expected[p:], i
        assert len(watched.commits[i]) <= steps * -(-o // BLOCK)
    assert 0 < predicted < 60


# No empty prompt: its masks look alike, so which is the most confident is rounding, another on every machine.
IN_ROUNDS = [(9, 7), (8, 8), (2, 5), (17, 6), (1, 5)]


def confident(model: Decoder, prompt: list[int], output: int) -> tuple[list[int], int]:
    """LowConfidence's loop: masks above the threshold and the best, and a last forward that meets none."""
    text, forwards = prompt[: len(prompt) // BLOCK * BLOCK], 0
    while len(text) < len(prompt) + output:
        start = len(text)
        text += prompt[start : start + BLOCK]
        text += [SMALL.mask_token] * (start + BLOCK - len(text))
        while masks := [p for p in range(BLOCK) if text[start + p] == SMALL.mask_token]:
            forwards += 1
            sure, said = (x.tolist() for x in logits(model, text, BLOCK)[start:].softmax(-1).max(-1))
            best = max(masks, key=lambda q: (sure[q], -q))
            for p in masks:
                if sure[p] >= np.float32(0.6) or p == best:
                    text[start + p] = said[p]
    return text[: len(prompt) + output], forwards


class Rounds(Texts):
    """Serves requests and keeps each one's text and its forwards that met a mask of the engine's."""

    def __init__(self, model: Decoder, policy: Policy) -> None:
        self.forwards = [0] * len(IN_ROUNDS)
        super().__init__(model, policy, IN_ROUNDS, Limits(40, 256, policy.batching.max_batch or 4))

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = super().step(plan)
        assert self.forward.cache.num_pages - self.forward.cache.num_free <= plan.pages
        for i, request in enumerate(plan.requests.tolist()):
            self.forwards[request] += int(plan.phases[i] == Phase.DENOISE)
        return outcome


@pytest.mark.parametrize("name", ["sglang-fdfo", "sglang-sync"])
def test_rounds_answer_as_the_engines_loop_does(name: str) -> None:
    model = decoder()
    spec = f"{name},block_length={BLOCK},page_size=8,max_running_requests=3,threshold=0.6"
    served = Rounds(model, parse(spec))
    for i, (p, o) in enumerate(IN_ROUNDS):
        assert (served.texts[i], served.forwards[i]) == confident(model, PROMPTS(i, p).tolist(), o), i
