"""dLLM-Cache and MaskKV as their specification tells them (full-sequence-diffusion.md 1.1, 3): a request alone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsim.engine.part import numbers_of
from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.maskkv import MaskKV, head_budgets, layer_budgets
from dsim.engine.spec import Policy
from dsim.engine.unmasking import Unmasking
from dsim.live.model import Decoder, Layer

from .plain_focus import feed, norm, project


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


@dataclass
class Cached:
    """What a layer keeps, of every position."""

    keys: Tensor  # turned, [L, KV heads, head_dim]
    values: Tensor
    attended: Tensor  # what attention added, [L, hidden]
    fed: Tensor  # what the feed-forward added


class PlainPeriodic(PlainLoop):
    """Serves one request."""

    def __init__(self, model: Decoder, policy: Policy, importance: Sequence[float]) -> None:
        super().__init__(model, policy)
        assert isinstance(policy.cache, PeriodicCache)
        self.rule, self.importance = policy.cache, importance
        self.computed: list[list[int]] = []  # [step][layer]: positions
        self.kept: list[list[list[int]]] = []  # [layer][KV head]: those of the prompt

    def serve(self, prompt: list[int], output: int) -> list[dict[int, int]]:
        c, length = self.model.config, len(prompt) + -(-output // self.block) * self.block
        self.prompt, self.response = list(range(len(prompt))), list(range(len(prompt), length))
        nothing = [(c.kv_heads, c.head_dim), (c.kv_heads, c.head_dim), (c.hidden,), (c.hidden,)]
        self.cached = [Cached(*(torch.full((length, *n), math.nan) for n in nothing)) for _ in range(c.layers)]
        self.kept = [[self.prompt] * c.kv_heads for _ in range(c.layers)]
        self.computed = []
        return super().serve(prompt, output)

    def logits(self, text: list[int], start: int, step: int) -> Tensor:
        hidden = self.forward(text, len(self.computed))
        return self.model.logits(hidden[start : start + self.block])

    def forward(self, text: list[int], step: int) -> Tensor:
        """Final hidden states of all positions, those that this step did not compute from the cache (3.1)."""
        model, prompt, response = self.model, self.prompt, self.response
        of_prompt = step % self.rule.prompt_refresh == 0
        of_response = step % self.rule.response_refresh == 0
        changing = int(self.rule.transfer * len(response))
        x = model.embedding.weight[text]
        self.computed.append([])
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            cached = self.cached[index]
            q, k, v = project(model, layer, x, prompt + response)  # of all, to use what this step computes
            whole = index == 0 and self.rule.first_layer_whole
            rows = response if of_response or whole else least_similar(v, cached.values, response, changing)
            values = response if of_response or whole or changing else []
            if of_prompt or whole:
                rows, values = prompt + rows, prompt + values
            cached.keys[rows], cached.values[values] = k[rows], v[values]
            seen = [(prompt if of_prompt or whole else kept) + response for kept in self.kept[index]]  # by each KV head
            cached.attended[rows] = attention(q[rows], cached.keys, cached.values, seen) @ layer.output.weight.T
            x = x + cached.attended
            cached.fed[rows] = feed(layer, x[rows])
            x = x + cached.fed
            self.computed[-1].append(len(rows))
            if step == 0 and isinstance(self.rule, MaskKV) and len(prompt) > self.rule.budget:
                self.kept[index] = self.keep(self.rule, index, votes(q[response], k))
        return norm(model.norm, x)

    def keep(self, rule: MaskKV, layer: int, cast: Tensor) -> list[list[int]]:
        """The prompt positions that each KV head of a layer keeps, by the votes cast, [KV heads, L] (3.2 to 3.4)."""
        num = layer_budgets(rule, np.array(self.importance), len(self.prompt))[layer]
        preference = (cast[:, self.prompt].sum(1) / cast.sum(1)).numpy()
        budgets = head_budgets(rule, preference, int(num), len(self.prompt))
        return [
            sorted(sorted(self.prompt, key=lambda j: (-ballot[j], j))[:budget])
            for ballot, budget in zip(cast.tolist(), budgets, strict=True)
        ]


def attention(q: Tensor, keys: Tensor, values: Tensor, seen: list[list[int]]) -> Tensor:
    """[n, H, D] to [n, H x D]; the queries of KV head i see the positions seen[i]."""
    group, read = q.shape[1] // keys.shape[1], []
    for h in range(q.shape[1]):
        there = seen[h // group]
        score = q[:, h] @ keys[there, h // group].T * q.shape[2] ** -0.5
        read.append(score.softmax(1) @ values[there, h // group])
    return torch.cat(read, 1)


def similarity(new: Tensor, old: Tensor) -> Tensor:
    """Cosines of rows in units of 2 ** -20, so that values that have not changed are at 1, and tie."""
    new, old = new.flatten(1).double(), old.flatten(1).double()
    return ((new * old).sum(1) / (new.norm(dim=1) * old.norm(dim=1)) * 2**20).round()  # type: ignore[no-any-return]


def least_similar(new: Tensor, old: Tensor, positions: list[int], num: int) -> list[int]:
    """The positions whose values have changed most, in order."""
    alike = dict(zip(positions, similarity(new[positions], old[positions]).tolist(), strict=True))
    return sorted(sorted(positions, key=lambda p: (alike[p], p))[:num])


def votes(q: Tensor, k: Tensor) -> Tensor:
    """Section 3.2: what the masks q [n, H, D] look at, summed over them and a KV head's queries, [KV heads, L]."""
    cast = torch.zeros(k.shape[1], len(k), dtype=torch.float64)
    for h in range(q.shape[1]):
        kv = h // (q.shape[1] // k.shape[1])
        cast[kv] += (q[:, h] @ k[:, kv].T * q.shape[2] ** -0.5).softmax(1).double().sum(0)
    return cast
