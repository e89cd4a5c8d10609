"""The published loops of a request alone, and which masks a step commits (full-sequence-diffusion.md 1.1)."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dsim.engine.part import numbers_of
from dsim.engine.policy import Policy
from dsim.engine.unmasking import Unmasking
from dsim.live.model import Decoder


class PlainLoop(ABC):
    """Serves one request, block by block."""

    def __init__(self, model: Decoder, policy: Policy) -> None:
        self.model, self.policy, self.block = model, policy, policy.block_length

    @abstractmethod
    def logits(self, text: list[int], start: int, step: int) -> Tensor:
        """The block's, in a step of it."""

    @torch.no_grad()
    def serve(self, prompt: list[int], output: int) -> list[dict[int, int]]:
        """What each step commits, position -> token."""
        block, steps = self.block, list[dict[int, int]]()
        text = prompt + [self.model.config.mask_token] * (-(-output // block) * block)
        for start in range(len(prompt), len(text), block):
            masks, step = set(range(start, start + block)), 0
            while masks:
                best, token = self.logits(text, start, step).softmax(-1).max(-1)
                now = self.choose(dict(enumerate(best.tolist(), start)), masks, step)
                if self.policy.batching.first_token and step == 0:
                    now = {start}
                steps.append({p: int(token[p - start]) for p in now})
                for p, t in steps[-1].items():
                    text[p] = t
                masks -= now
                step += 1
            if step == 1 and numbers_of(self.policy)["once_more"]:  # errata 7: a reuse pass that commits nothing
                steps.append({})
        return steps or [{}]

    def choose(self, best: dict[int, float], masks: set[int], step: int) -> set[int]:
        """The masks that commit, by their confidences."""
        return chosen(self.policy.unmasking, self.block, best, masks, step)


def chosen(rule: Unmasking, block: int, best: dict[int, float], masks: set[int], step: int) -> set[int]:
    """The positions that step `step` of the block commits, by their confidences."""
    order = sorted(masks, key=lambda p: (-best[p], p))
    if rule.strategy == "low_confidence_dynamic":
        return {order[0]} | {p for p in masks if best[p] >= rule.threshold}
    least, more = divmod(block, rule.denoising_steps or block)
    num = least + (1 if step < more else 0)
    if rule.strategy == "sequential":
        return masks & set(range(min(masks), min(masks) + num))
    return set(order[:num])
