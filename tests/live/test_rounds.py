"""SGLang's rounds on a decoder: prompts prefilled a block a round, and tokens that change until their block is done."""

import numpy as np
import pytest

from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live.model import Decoder

from .dense import SMALL, logits
from .watched import PROMPTS, Texts, decoder

BLOCK = 4
# No empty prompt: its masks look alike, so which is the most confident is rounding, another on every machine.
LENGTHS = [(9, 7), (8, 8), (2, 5), (17, 6), (1, 5)]
MASK = SMALL.mask_token


def confident(model: Decoder, prompt: list[int], output: int) -> tuple[list[int], int]:
    """LowConfidence's loop: masks above the threshold and the best, and a last forward that meets none."""
    text, forwards = prompt[: len(prompt) // BLOCK * BLOCK], 0
    while len(text) < len(prompt) + output:
        start = len(text)
        text += prompt[start : start + BLOCK]
        text += [MASK] * (start + BLOCK - len(text))
        while masks := [p for p in range(BLOCK) if text[start + p] == MASK]:
            forwards += 1
            sure, said = (x.tolist() for x in logits(model, text, BLOCK)[start:].softmax(-1).max(-1))
            best = max(masks, key=lambda q: (sure[q], -q))
            for p in masks:
                if sure[p] >= np.float32(0.6) or p == best:
                    text[start + p] = said[p]
    return text[: len(prompt) + output], forwards


class Watched(Texts):
    """Serves requests and keeps each one's text and its forwards that met a mask of the engine's."""

    def __init__(self, model: Decoder, policy: Policy) -> None:
        self.forwards = [0] * len(LENGTHS)
        super().__init__(model, policy, LENGTHS, Limits(40, 256, policy.batching.max_batch or 4))

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = super().step(plan)
        assert self.forward.cache.num_pages - self.forward.cache.num_free <= plan.pages
        for i, request in enumerate(plan.requests.tolist()):
            self.forwards[request] += int(plan.phases[i] == Phase.DENOISE)
        return outcome


def small(spec: str) -> Policy:
    name, comma, rest = spec.partition(",")
    return parse(f"{name},block_length={BLOCK},page_size=8,max_running_requests=3{comma}{rest}")


@pytest.mark.parametrize("name", ["sglang-fdfo", "sglang-sync"])
def test_rounds_answer_as_the_engines_loop_does(name: str) -> None:
    model = decoder()
    watched = Watched(model, small(f"{name},threshold=0.6"))
    for i, (p, o) in enumerate(LENGTHS):
        assert (watched.texts[i], watched.forwards[i]) == confident(model, PROMPTS(i, p).tolist(), o), i
