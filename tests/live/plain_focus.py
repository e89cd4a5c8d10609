"""FOCUS as its specification tells it (focus.md 3.1 to 3.6): a request alone, dense keys, sets and loops."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsim.engine.policies.focus import Focus
from dsim.live.model import Decoder, Layer

from ..engine.test_focus import by_the_book
from ..kernels.places import starts
from ..kernels.test_focus_importance import by_definition
from .dense import Dense


@dataclass(frozen=True)
class Step:
    """What a step of one request did, in absolute positions."""

    computed: frozenset[int]
    retained: frozenset[int]
    committed: dict[int, int]  # position -> token


class PlainFocus:
    """Serves one request."""

    def __init__(self, model: Decoder, rule: Focus, block: int, threshold: float) -> None:
        self.model, self.rule, self.block, self.threshold = model, rule, block, threshold
        c = model.config
        self.keys, self.values = (torch.zeros(c.layers, c.context_limit, c.kv_heads, c.head_dim) for _ in range(2))

    @torch.no_grad()
    def serve(self, prompt: list[int], output: int) -> list[Step]:
        block, mask, end = self.block, self.model.config.mask_token, len(prompt) + output
        text = dict.fromkeys(range(-(-end // block) * block), mask) | dict(enumerate(prompt))
        start = (max(1, len(prompt)) - 1) // block * block
        open_ = set(range(len(prompt), len(text)))  # masks

        positions = list(range(start + block))
        own = open_ & set(range(start, start + block))
        hidden, _ = self.forward(text, positions, [set(range((p // block + 1) * block)) for p in positions])
        committed = self.unmask(hidden, positions, own)
        steps = [Step(frozenset(positions[start:]), frozenset(positions[start:]), committed)]
        uncached = set(positions[start:]) if own else set()
        open_ -= set(committed)
        text |= committed

        progress = start - 1
        decoded: list[int] = []
        while True:
            inside = set(range(start, start + block))
            if not open_ & inside and start + block >= end:
                return steps
            if not uncached:
                start += block
                uncached, progress = set(range(start, start + block)), start - 1
                decoded = []
                continue
            masked = open_ & inside
            mean = torch.tensor(decoded or [1]).double().mean().item()
            target = min(len(masked), max(1, math.ceil(max(mean, 1.0) * self.rule.alpha)))
            hidden, retained = self.forward(
                text, sorted(uncached), [self.seen(start, uncached, uncached)] * len(uncached),
                (start, sorted(masked), target, progress, uncached) if len(masked) > target else None,
            )  # fmt: skip
            committed = self.unmask(hidden, retained, masked & set(retained))
            steps.append(Step(frozenset(uncached), frozenset(retained), committed))
            progress = max(progress, *retained)
            if committed:
                decoded = [*decoded, len(committed)]
            last = start + block - 1
            uncached = {p for p in uncached if p in masked or (p != last and p + 1 in masked)}
            open_ -= set(committed)
            text |= committed

    def seen(self, start: int, computed: set[int], uncached: set[int]) -> set[int]:
        """The keys that every query of a step sees."""
        if self.rule.visible == "prefix":
            return set(range(max(computed) + 1))
        return set(range(start)) | computed | (set(range(start, start + self.block)) - uncached)

    def forward(
        self, text: dict[int, int], positions: list[int], seen: list[set[int]],
        evict: tuple[int, list[int], int, int, set[int]] | None = None,
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """Final hidden states, and the positions that they are of."""
        model = self.model
        x = model.embedding.weight[[text[p] for p in positions]]
        importance = []
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            q, k, v = project(model, layer, x, positions)
            self.keys[index, positions], self.values[index, positions] = k, v
            if evict and index < 2:
                start, masked, target, progress, uncached = evict
                rows = [positions.index(p) for p in masked]
                importance.append(by_definition(q, k, torch.tensor(rows), starts([len(rows)])))
            if evict and index == 1:
                chosen = by_the_book((importance[1] - importance[0]).tolist(), masked, target, progress)
                left = [p for p in positions if p in chosen or p not in masked]
                rows = [positions.index(p) for p in left]
                x, q, positions = x[rows], q[rows], left
                seen = [self.seen(start, set(left), uncached)] * len(left)
            x = x + attention(q, self.keys[index], self.values[index], seen) @ layer.output.weight.T
            x = x + feed(layer, x)
        return norm(model.norm, x), positions

    def unmask(self, hidden: Tensor, positions: list[int], masked: set[int]) -> dict[int, int]:
        """The tokens that commit: those sure enough, and the surest."""
        best = {}
        for p, row in zip(positions, hidden, strict=True):
            if p in masked:
                confidence, token = (row @ self.model.head_weight.T).softmax(-1).max(-1)
                best[p] = (float(confidence), int(token))
        surest = max(best, key=lambda p: (best[p][0], -p), default=None)
        return {p: token for p, (confidence, token) in best.items() if confidence >= self.threshold or p == surest}


def project(model: Decoder, layer: Layer, x: Tensor, positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    c = model.config
    q, k, v = (
        (norm(layer.attention_norm, x) @ layer.qkv.weight.T)
        .view(len(x), -1, c.head_dim)
        .split([c.heads, c.kv_heads, c.kv_heads], dim=1)
    )
    return rope(norm(layer.q_norm, q), positions, c.rope_theta), rope(norm(layer.k_norm, k), positions, c.rope_theta), v


def feed(layer: Layer, x: Tensor) -> Tensor:
    """The feed-forward's residual."""
    gate, up = (norm(layer.ffn_norm, x) @ layer.gate_up.weight.T).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up) @ layer.down.weight.T  # type: ignore[no-any-return]


def norm(module: object, x: Tensor) -> Tensor:
    assert isinstance(module, torch.nn.RMSNorm)
    return x / (x.square().mean(-1, keepdim=True) + (module.eps or 0.0)).sqrt() * module.weight


def rope(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """Components i and i + D/2 of [n, H, D] are a plane that turns by position x theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = torch.tensor([[p * theta ** (-i / half) for i in range(half)] for p in positions])
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def attention(q: Tensor, keys: Tensor, values: Tensor, seen: list[set[int]]) -> Tensor:
    """[n, H, D] to [n, H x D]; query i sees the keys seen[i]."""
    mask = torch.tensor([[j in there for j in range(len(keys))] for there in seen])
    return Dense(mask)(0, q, keys, values).flatten(1)
