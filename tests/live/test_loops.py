"""The families' published loops, written plainly, against what the executor answers: shifted rows, predicted masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.engine.engine import Limits
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policy import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live.model import Decoder

from .dense import SMALL, Dense, logits
from .test_full_sequence import Plain
from .watched import PROMPTS, Texts, decoder, run

SHIFTED = replace(SMALL, shifted=True)
DREAM = replace(SHIFTED, by_entropy=True)
LENGTHS = [(9, 11), (8, 16), (12, 3), (23, 16), (3, 9), (16, 8)]
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
    watched = run(policy, LENGTHS, config=config, model=model)
    for i, (p, o) in enumerate(LENGTHS):
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
    watched = run(policy, LENGTHS, model=model)
    predicted = 0
    for i, (p, o) in enumerate(LENGTHS):
        said = {at: token for step in watched.commits[i] for at, token in step.items()}
        expected, left = llada(model, PROMPTS(i, p).tolist(), o, steps)
        predicted += left
        assert [said[at] for at in range(p, p + o)] == expected[p:], i
        assert len(watched.commits[i]) <= steps * -(-o // BLOCK)
    assert 0 < predicted < 60


# No empty prompt: its masks look alike, so which is the most confident is rounding, another on every machine.
ROUNDS = [(9, 7), (8, 8), (2, 5), (17, 6), (1, 5)]


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
        self.forwards = [0] * len(ROUNDS)
        super().__init__(model, policy, ROUNDS, Limits(40, 256, policy.batching.max_batch or 4))

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = super().step(plan)
        assert self.forward.cache.num_pages - self.forward.cache.num_free <= plan.pages
        for i, request in enumerate(plan.requests.tolist()):
            self.forwards[request] += int(plan.phases[i] == Phase.DENOISE)
        return outcome


def in_rounds(spec: str) -> Policy:
    name, comma, rest = spec.partition(",")
    return parse(f"{name},block_length={BLOCK},page_size=8,max_running_requests=3{comma}{rest}")


@pytest.mark.parametrize("name", ["sglang-fdfo", "sglang-sync"])
def test_rounds_answer_as_the_engines_loop_does(name: str) -> None:
    model = decoder()
    served = Rounds(model, in_rounds(f"{name},threshold=0.6"))
    for i, (p, o) in enumerate(ROUNDS):
        assert (served.texts[i], served.forwards[i]) == confident(model, PROMPTS(i, p).tolist(), o), i
