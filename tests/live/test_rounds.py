"""SGLang's rounds on a decoder: prompts prefilled a block a round, and tokens that change until their block is done."""

from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import CanvasLaw, LawDraws
from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.engine.request import Request
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live import session
from dsim.live.model import Decoder

from .dense import SMALL, logits
from .watched import PROMPTS, decoder, serve_all

BLOCK = 4
# No empty prompt: its masks look alike, so which is the most confident is rounding, another on every machine.
LENGTHS = [(9, 7), (8, 8), (2, 5), (17, 6), (1, 5)]
MASK = SMALL.mask_token


def settled(model: Decoder, prompt: list[int], output: int) -> tuple[list[int], int, int]:
    """JointThreshold's loop of one request, position by position: its text, its forwards, and how many tokens changed.

    Later blocks see a block as its last forward met it: no other forward leaves its keys and values.
    """
    text, forwards, changes = prompt[: len(prompt) // BLOCK * BLOCK], 0, 0
    seen = list(text)
    while len(text) < len(prompt) + output:
        start, post = len(text), 0
        text += prompt[start : start + BLOCK]
        text += [MASK] * (start + BLOCK - len(text))
        for _ in range(BLOCK + 16 + 1):
            forwards += 1
            before = text[start:]
            sure, said = (x.tolist() for x in logits(model, seen + before, BLOCK)[start:].softmax(-1).max(-1))
            masks = [p for p in range(BLOCK) if before[p] == MASK]
            for p in range(BLOCK):
                if p in masks:
                    if sure[p] > 0.5 or p == max(masks, key=lambda q: (sure[q], -q)):
                        text[start + p] = said[p]
                elif start + p >= len(prompt) and (masks or post < 16) and said[p] != before[p]:
                    text[start + p] = said[p]
                    changes += 1
            post += not masks
            if not masks and before == text[start:]:
                break
        seen += before
    return text[: len(prompt) + output], forwards, changes


def confident(model: Decoder, prompt: list[int], output: int) -> tuple[list[int], int, int]:
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
    return text[: len(prompt) + output], forwards, 0


class Watched:
    """Serves requests and keeps each one's text and its forwards that met a mask of the engine's."""

    def __init__(self, model: Decoder, policy: Policy, draws: Any = None) -> None:
        requests = [Request(i, 0.0, *lengths) for i, lengths in enumerate(LENGTHS)]
        limits = Limits(40, 256, policy.batching.max_batch or 4)
        serving = session.Serving(model, policy, limits, PROMPTS, draws)
        forward: Any = serving.forward(requests)
        self.executor, self.cache = serving.executor(forward), forward.cache
        self.texts: dict[int, list[int]] = {}
        self.forwards = [0] * len(requests)
        done = serve_all(self, policy, limits, requests)
        assert (done.table["status"] == 0).all()
        assert done.differences() == []

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.step(plan)
        assert self.cache.num_pages - self.cache.num_free <= plan.pages
        for i, request in enumerate(plan.requests.tolist()):
            self.forwards[request] += int(plan.phases[i] == Phase.DENOISE)
            self.texts[request] = self.executor.text(request, int(plan.slots[i]), int(plan.end[i])).tolist()
        return outcome


def calm() -> Decoder:
    """A decoder whose edits come to rest, for a token mostly says itself; those of the other's hardly ever do."""
    model = decoder()
    with torch.no_grad():
        model.embedding.weight.mul_(0.3)
        model.head.weight.copy_(model.embedding.weight)
        model.head.weight[MASK] = 0.0
    return model


def small(spec: str) -> Policy:
    name, comma, rest = spec.partition(",")
    return parse(f"{name},block_length={BLOCK},page_size=8,max_running_requests=3{comma}{rest}")


@pytest.mark.parametrize(
    ("spec", "loop"),
    [
        ("sglang-joint", settled), ("sglang-joint,dllm_fdfo=false", settled),
        ("sglang-joint,prefill_blocks_per_round=2,steps_per_round=3", settled),
        ("sglang-fdfo,threshold=0.6", confident),
        ("sglang-sync,threshold=0.6", confident),
    ],
)  # fmt: skip
def test_rounds_answer_as_the_engines_loop_does(spec: str, loop: Any) -> None:
    model = calm() if "steps_per_round" in spec else decoder()
    watched = Watched(model, small(spec))
    changed = 0
    for i, (p, o) in enumerate(LENGTHS):
        text, forwards, changes = loop(model, PROMPTS(i, p).tolist(), o)
        assert watched.texts[i] == text, i
        assert watched.forwards[i] == forwards, i
        changed += changes
    assert (changed > 5) == (loop is settled)


def test_a_block_whose_likeliest_token_is_the_mask_ends_all_the_same() -> None:
    model = decoder()
    with torch.no_grad():
        model.head.weight[MASK] *= 4.0
    watched = Watched(model, small("sglang-joint"))
    assert max(watched.forwards) <= 2 * (BLOCK + 16 + 1)
    assert any(MASK in text for text in watched.texts.values())
    for i, (p, o) in enumerate(LENGTHS):
        assert (watched.texts[i], watched.forwards[i]) == settled(model, PROMPTS(i, p).tolist(), o)[:2]


def test_a_law_says_when_an_edited_block_is_done() -> None:
    law = LawDraws(CanvasLaw("", BLOCK, 3.0), 0, len(LENGTHS))
    watched = Watched(decoder(), small("sglang-joint"), law)
    assert watched.forwards == [3 * (-(-(p + o) // BLOCK) - p // BLOCK) for p, o in LENGTHS]
