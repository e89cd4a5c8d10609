"""A canvas of DiffusionGemma: text encoded into pages, and a canvas denoised over it with keys that are not kept.

Pages are of two kinds: full layers keep all of the text, sliding ones what a window still sees, and pages behind it
are released. A canvas's keys and values go to the slots behind the text, are written over in each of its steps, and
again, causally, by the encoding of what it became. Attention is plain PyTorch over gathered keys: the ragged kernel
knows no window.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cache import PagedCache
from .canvas_model import CanvasModel, Renoise


class Chance(Protocol):
    """What a canvas draws."""

    def noise(self, num: int, vocab: int) -> Tensor:
        """Uniform tokens, [num]."""

    def draw(self, probabilities: Tensor) -> Tensor:
        """A token of each row of [rows, vocab]."""


@dataclass(frozen=True)
class PageShape:
    """What a PagedCache is told of the layers of one kind."""

    layers: int
    kv_heads: int
    head_dim: int


class CanvasCache:
    """Pages of sequences by slot, in one cache for sliding layers and one for full ones."""

    def __init__(
        self, model: CanvasModel, num_pages: tuple[int, int], page_size: int, device: str, dtype: torch.dtype
    ) -> None:
        """num_pages: of the sliding layers' cache, and of the full ones'."""
        config = model.config
        self._model, self.page_size = model, page_size
        self.of: dict[bool, PagedCache] = {}
        self._index: list[int] = []  # of each layer, among those of its kind
        for sliding, pages in zip((True, False), num_pages, strict=True):
            kind = [layer for layer in config.layers if layer.sliding == sliding]
            assert len({(layer.kv_heads, layer.head_dim) for layer in kind}) <= 1, "layers of a kind are alike"
            if kind:
                shape = PageShape(len(kind), kind[0].kv_heads, kind[0].head_dim)
                self.of[sliding] = PagedCache(shape, pages, page_size, device, dtype)
        seen = {True: 0, False: 0}
        for layer in config.layers:
            self._index.append(seen[layer.sliding])
            seen[layer.sliding] += 1
        self.length: dict[int, int] = {}  # tokens of text, by slot

    @torch.inference_mode()
    def encode(self, slot: int, tokens: Tensor) -> Tensor:
        """Add text to a slot's, causally: its final states. Pages that no window will see again are released."""
        begin = self.length.get(slot, 0)
        end = begin + len(tokens)
        self._reserve(slot, end)
        positions = torch.arange(begin, end, device=tokens.device)
        hidden = self._model.encode(tokens, positions, _Attention(self, slot, begin, end, causal=True))
        self.length[slot] = end
        if True in self.of:
            self.of[True].release_before(slot, max(0, end - self._model.config.window + 1))
        return hidden

    @torch.inference_mode()
    def denoise(self, slot: int, tokens: Tensor, soft: Tensor | None) -> Tensor:
        """Logits [canvas, vocab] of a canvas behind a slot's text; its keys and values are scratch."""
        begin = self.length[slot]
        end = begin + len(tokens)
        self._reserve(slot, end)
        positions = torch.arange(begin, end, device=tokens.device)
        attend = _Attention(self, slot, begin, end, causal=False)
        return self._model.logits(self._model.denoise(tokens, soft, positions, attend))

    def release(self, slot: int) -> None:
        """Take back a slot's pages."""
        self.length.pop(slot, None)
        for cache in self.of.values():
            cache.release(slot)

    def _reserve(self, slot: int, tokens: int) -> None:
        for cache in self.of.values():
            cache.reserve(np.array([slot], np.int32), np.array([tokens]))

    def first_seen(self, sliding: bool, text: int) -> int:
        """The first position that a canvas behind `text` tokens sees, or that their next one does."""
        return max(0, text - self._model.config.window + 1) if sliding else 0


class _Attention:
    """Attention of positions begin to end of a slot: of text, causal, or of a canvas, to all that a window shows."""

    def __init__(self, cache: CanvasCache, slot: int, begin: int, end: int, causal: bool) -> None:
        self._cache, self._slot, self._begin, self._end, self._causal = cache, slot, begin, end, causal

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self._cache._model.config
        sliding, index = config.layers[layer].sliding, self._cache._index[layer]
        pages, first = self._cache.of[sliding], self._cache.first_seen(sliding, self._begin)
        places = self._places(pages, first)
        keys, values = (x[index].view(-1, *k.shape[1:]) for x in (pages.keys, pages.values))
        own = places[self._begin - first :]
        keys[own], values[own] = k, v
        mask = None
        if self._causal:
            query = torch.arange(self._begin, self._end, device=q.device)[:, None]
            key = torch.arange(first, self._end, device=q.device)
            mask = key <= query
            if sliding:
                mask &= query - key < config.window
        q, k, v = (x.transpose(0, 1)[None] for x in (q, keys[places], values[places]))
        read = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
        return read[0].transpose(0, 1)

    def _places(self, pages: PagedCache, first: int) -> Tensor:
        positions = np.arange(first, self._end)
        slots = np.full(len(positions), self._slot, np.int32)
        return torch.from_numpy(pages.places(slots, positions)).to(pages.keys.device)


@dataclass(slots=True, eq=False)
class Canvas:
    """A canvas on its way: what it holds, what it was taken for, and how many steps it has had."""

    tokens: Tensor  # [canvas]
    soft: Tensor | None = None  # logits of the step before, at its temperature: the self-conditioning
    likeliest: list[Tensor] = field(default_factory=list)  # arg-max tokens of its steps, as many as stability looks at
    steps: int = 0
    done: bool = False

    @property
    def answer(self) -> Tensor:
        """What the canvas became: the likeliest tokens of its last step, not those drawn."""
        return self.likeliest[-1]


def advance(canvas: Canvas, logits: Tensor, rule: Renoise, chance: Chance) -> None:
    """Take a step's logits [canvas, vocab] in: accept, renoise, and see whether the canvas is done (1.2)."""
    remaining = rule.max_steps - canvas.steps
    scaled = logits / (rule.t_min + (rule.t_max - rule.t_min) * (remaining / rule.max_steps))
    logs = scaled.log_softmax(dim=-1)
    probabilities = logs.exp()
    drawn = chance.draw(probabilities)
    entropy = -(logs.clamp(min=torch.finfo(logs.dtype).min) * probabilities).sum(dim=-1)
    accepted = accept(entropy, rule.entropy_bound)
    noise = chance.noise(len(drawn), logits.shape[1])
    canvas.tokens = torch.where(accepted, drawn, noise)
    canvas.soft = scaled
    likeliest, before = scaled.argmax(dim=-1), canvas.likeliest[max(0, len(canvas.likeliest) - rule.stability) :]
    stable = len(before) >= rule.stability and all(torch.equal(likeliest, past) for past in before)
    canvas.likeliest = [*before, likeliest]
    canvas.steps += 1
    canvas.done = canvas.steps == rule.max_steps or bool(stable and entropy.mean() < rule.confidence)


def accept(entropy: Tensor, bound: float) -> Tensor:
    """Positions whose strictly surer ones' entropies add up to at most `bound`: at least one; [canvas] to the same."""
    ordered, order = entropy.sort(stable=True)
    chosen: Tensor = torch.zeros_like(entropy, dtype=torch.bool)
    chosen[order] = ordered.cumsum(dim=0) - ordered <= bound
    return chosen
