"""dLLM-Cache and MaskKV as their specification tells them (full-sequence-diffusion.md 1.1, 3): a request alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.policy import Policy
from dsim.kernels.qk_norm_rope import rotate
from dsim.live.model import Decoder, Layer

from .plain_focus import norm
from .plain_unmasking import chosen


@dataclass
class Cached:
    """What a layer keeps, of every position."""

    keys: Tensor  # turned, [L, KV heads, head_dim]
    values: Tensor
    attended: Tensor  # what attention added, [L, hidden]
    fed: Tensor  # what the feed-forward added


class PlainPeriodic:
    """Serves one request."""

    def __init__(self, model: Decoder, policy: Policy, importance: Sequence[float]) -> None:
        assert isinstance(policy.cache, PeriodicCache)
        self.model, self.policy, self.rule, self.importance = model, policy, policy.cache, importance
        self.computed: list[list[int]] = []  # [step][layer]: positions
        self.kept: list[list[list[int]]] = []  # [layer][KV head]: those of the prompt

    @torch.no_grad()
    def serve(self, prompt: list[int], output: int) -> list[dict[int, int]]:
        """What each step commits, position -> token."""
        block, c, steps = self.policy.block_length, self.model.config, list[dict[int, int]]()
        text = prompt + [c.mask_token] * (-(-output // block) * block)
        self.prompt, self.response = list(range(len(prompt))), list(range(len(prompt), len(text)))
        nothing = [(c.kv_heads, c.head_dim), (c.kv_heads, c.head_dim), (c.hidden,), (c.hidden,)]
        self.cached = [Cached(*(torch.full((len(text), *n), math.nan) for n in nothing)) for _ in range(c.layers)]
        self.kept = [[self.prompt] * c.kv_heads for _ in range(c.layers)]
        self.computed = []
        for start in range(len(prompt), len(text), block):
            masks, step = set(range(start, start + block)), 0
            while masks:
                hidden = self.forward(text, len(steps))
                best, token = self.model.logits(hidden[start : start + block]).softmax(-1).max(-1)
                now = self.choose(dict(enumerate(best.tolist(), start)), masks, step)
                steps.append({p: int(token[p - start]) for p in now})
                for p, t in steps[-1].items():
                    text[p] = t
                masks -= now
                step += 1
        return steps or [{}]

    def choose(self, best: dict[int, float], masks: set[int], step: int) -> set[int]:
        """The masks that commit, by their confidences."""
        return chosen(self.policy.unmasking, self.policy.block_length, best, masks, step)

    def forward(self, text: list[int], step: int) -> Tensor:
        """Final hidden states of all positions, those that this step did not compute from the cache (3.1)."""
        model, prompt, response = self.model, self.prompt, self.response
        of_prompt = step % self.rule.prompt_refresh == 0
        of_response = step % self.rule.response_refresh == 0
        changing = int(self.rule.transfer * len(response))
        x, cos, sin = model.enter(torch.tensor(text), torch.arange(len(text)))
        self.computed.append([])
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            cached = self.cached[index]
            q, k, v = project(model, layer, x, cos, sin)  # of all, to use what this step computes
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
        num = layer_budgets(rule, self.importance, len(self.prompt))[layer]
        preference = (cast[:, self.prompt].sum(1) / cast.sum(1)).tolist()
        budgets = head_budgets(rule, num, preference, len(self.prompt))
        return [
            sorted(sorted(self.prompt, key=lambda j: (-ballot[j], j))[:budget])
            for ballot, budget in zip(cast.tolist(), budgets, strict=True)
        ]


def project(model: Decoder, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values, [n, heads, head_dim]."""
    c = model.config
    rows = (norm(layer.attention_norm, x) @ layer.qkv.weight.T).view(len(x), -1, c.head_dim)
    q, k, v = rows[:, : c.heads], rows[:, c.heads : -c.kv_heads], rows[:, -c.kv_heads :]
    return rotate(norm(layer.q_norm, q), cos, sin), rotate(norm(layer.k_norm, k), cos, sin), v


def feed(layer: Layer, x: Tensor) -> Tensor:
    """What the feed-forward adds to x."""
    gate, up = (norm(layer.ffn_norm, x) @ layer.gate_up.weight.T).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up) @ layer.down.weight.T  # type: ignore[no-any-return]


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


def layer_budgets(rule: MaskKV, importance: Sequence[float], prompt: int) -> list[int]:
    """Prompt keys of each layer, the mean over its KV heads (3.3)."""
    n = len(importance)
    boundary = {range(n)[i] for i in rule.boundary}
    middle = set(range(n)) - boundary
    shares, everything = [1 / n] * n, sum(importance)
    if everything and boundary and middle:
        for group in (boundary, middle):
            weight = sum(importance[i] for i in sorted(group)) / everything / len(group)
            for i in group:
                shares[i] = rule.beta / n + (1 - rule.beta) * weight
    return divided(n * rule.budget, shares, prompt)


def head_budgets(rule: MaskKV, num: int, preference: list[float], prompt: int) -> list[int]:
    """Prompt keys of each KV head of a layer whose mean is num (3.4)."""
    heads, total = len(preference), sum(preference)
    likings = [p / total if total else 1 / heads for p in preference]
    return divided(num * heads, [rule.alpha / heads + (1 - rule.alpha) * p for p in likings], prompt)


def divided(total: int, shares: list[float], most: int) -> list[int]:
    """Parts of a total by shares, none over `most`; what floors leave goes to the largest shares below it."""
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(shares)) if i not in full]
        weight = sum(shares[i] for i in open_)
        rest = total - most * len(full)
        ideal = {i: rest / weight * shares[i] if weight else rest / len(open_) for i in open_}
        reached = {i for i in open_ if ideal[i] >= most}
        if not reached:
            break
        full |= reached
    parts = [most if i in full else math.floor(ideal[i]) for i in range(len(shares))]
    left = total - sum(parts)
    assert 0 <= left <= len(open_), "no rounding loses more than one each"
    for i in sorted(open_, key=lambda i: (-shares[i], i))[:left]:
        parts[i] += 1
    return parts
