"""The families' published loops, written plainly, against what the executor answers: shifted rows, predicted masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live.config import ModelConfig
from dsim.live.model import Decoder

from .dense import SMALL, Dense, logits
from .watched import PROMPTS, Texts, decoder, run

SHIFTED = replace(SMALL, shifted=True)
DREAM = replace(SHIFTED, by_entropy=True)
LENGTHS = [(9, 11), (8, 16), (12, 3), (23, 16), (3, 9), (16, 8)]
BLOCK = 4


def quota(block: int, steps: int, step: int) -> int:
    """LLaDA's linear schedule."""
    return block // steps + (step < block % steps)


def without_mask(config: ModelConfig) -> Decoder:
    """A decoder that never predicts the mask: the published loops would go on for ever."""
    model = decoder(config)
    with torch.no_grad():
        model.head.weight[config.mask_token] = 0.0
    return model


@torch.no_grad()
def dream(model: Decoder, prompt: list[int], output: int, steps: int, reuse: str | None) -> list[int]:
    """The published loop by blocks; with a cache a block's first pass commits its first position alone (1.2)."""
    text = prompt + [model.config.mask_token] * (-(-output // BLOCK) * BLOCK)
    for start in range(len(prompt), len(text), BLOCK):
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            masks = [p for p in range(start, start + BLOCK) if text[p] == model.config.mask_token]
            if not masks:
                break
            whole = reuse is None or step == 0
            first, last = (0, len(text)) if whole else (start, len(text) if reuse == "prefix" else start + BLOCK)
            at = torch.arange(first, last)

            def attend(
                layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor = at, whole: bool = whole,
                kept: list[tuple[Tensor, Tensor]] = kept,
            ) -> Tensor:  # fmt: skip
                if whole:
                    kept[layer:] = [(k.clone(), v.clone())]
                kept[layer][0][at], kept[layer][1][at] = k, v
                return Dense(torch.ones(len(q), len(text), dtype=torch.bool))(layer, q, *kept[layer])

            rows = model.logits(model(torch.tensor(text[first:last]), at, attend))
            shifted = torch.cat([rows[:1], rows[:-1]])[start - first : start - first + BLOCK]
            token, doubt = shifted.argmax(-1), torch.distributions.Categorical(logits=shifted).entropy()
            order = sorted(masks, key=lambda p: (float(doubt[p - start]), p))
            time = [1 - i * (1 - 1e-3) / steps for i in range(steps + 1)]
            now = order if step == steps - 1 else order[: int(len(order) * (1 - time[step + 1] / time[step]))]
            for p in [start] if reuse and step == 0 else now:
                text[p] = int(token[p - start])
    return text[: len(prompt) + output]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spec", "reuse"),
    [("vanilla", None), ("vanilla,logits=block", None), ("fast-dllm", "dual"), ("fast-dllm:prefix", "prefix"),
     ("fast-dllm,logits=block", "dual")],
)  # fmt: skip
@pytest.mark.parametrize(("steps", "strategy"), [(4, None), (3, None), (3, "entropy")])
def test_dream_answers_as_its_published_loop(spec: str, reuse: str | None, steps: int, strategy: str | None) -> None:
    # The schedule is the checkpoint's, or the policy's, whatever the checkpoint is.
    config = SHIFTED if strategy else DREAM
    model = without_mask(config)
    strategy = "" if strategy is None else f",strategy={strategy}"
    policy = parse(f"{spec},denoising_steps={steps},block_length={BLOCK},page_size=8{strategy}")
    watched = run(policy, LENGTHS, config=config, model=model)
    for i, (p, o) in enumerate(LENGTHS):
        said = {at: token for step in watched.commits[i] for at, token in step.items()}
        expected = dream(model, PROMPTS(i, p).tolist(), o, steps, reuse)
        assert [said[at] for at in range(p, p + o)] == expected[p:], i
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
                for p in order[: quota(BLOCK, steps, step)]:
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


# ---- SGLang's rounds: prompts prefilled a block a round, and tokens that change until their block is done ----------

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
