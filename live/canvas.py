"""A canvas of DiffusionGemma: text encoded into pages, and a canvas denoised over it with keys that are not kept.

Full layers keep all of the text, sliding ones what a window still sees. A canvas's keys and values lie behind the text;
each step overwrites them, and so does the causal encoding of the finished canvas. The rows of many sequences are
computed together; attention is PyTorch's, one sequence at a time: the ragged kernel has no window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cache import PagedCache, PageShape
from .canvas_model import CanvasModel, Renoise

TILE = 64  # rows of logits at once, in fp32 and of a large vocabulary


class Chance(Protocol):
    """The random numbers of a canvas."""

    def noise(self, num: int, vocab: int) -> Tensor:
        """Uniform tokens, [num]."""

    def draw(self, probabilities: Tensor, first: int = 0) -> Tensor:
        """A token of each row of [rows, vocab], the canvas's from position `first` on."""


class CanvasCache:
    """Pages of sequences by slot: a cache for sliding layers and one for full ones."""

    def __init__(
        self, model: CanvasModel, num_pages: tuple[int, int], page_size: int, device: str, dtype: torch.dtype
    ) -> None:
        """num_pages: of the sliding layers' cache, and of the full ones'."""
        config = model.config
        self._model, self.page_size = model, page_size
        self.of: dict[bool, PagedCache] = {}
        self.index: list[int] = []  # of each layer, among those of its kind
        for sliding, pages in zip((True, False), num_pages, strict=True):
            kind = [layer for layer in config.layers if layer.sliding == sliding]
            assert len({(layer.kv_heads, layer.head_dim) for layer in kind}) <= 1, "layers of a kind are alike"
            if kind:
                shape = PageShape(len(kind), kind[0].kv_heads, kind[0].head_dim)
                self.of[sliding] = PagedCache(shape, pages, page_size, device, dtype)
        seen = {True: 0, False: 0}
        for layer in config.layers:
            self.index.append(seen[layer.sliding])
            seen[layer.sliding] += 1
        self.length: dict[int, int] = {}  # tokens of text, by slot

    @property
    def model(self) -> CanvasModel:
        """The weights."""
        return self._model

    @torch.inference_mode()
    def encode(self, texts: Mapping[int, Tensor]) -> Tensor:
        """Add text to slots', causally: its final states, [rows]. Pages behind every window are released."""
        spans = self._spans({slot: len(tokens) for slot, tokens in texts.items()})
        tokens = torch.cat(list(texts.values()))
        hidden = self._model.encode(tokens, self._positions(spans), _Attention(self, spans, causal=True))
        for slot, _, end in spans:
            self.length[slot] = end
            if True in self.of:
                self.of[True].release_before(slot, max(0, end - self._model.config.window + 1))
        return hidden

    @torch.inference_mode()
    def denoise(self, canvases: "Mapping[int, Canvas]") -> dict[int, Tensor]:
        """Final states [canvas, hidden] of canvases behind their slots' texts."""
        spans = self._spans({slot: len(canvas.tokens) for slot, canvas in canvases.items()})
        tokens = torch.cat([canvas.tokens for canvas in canvases.values()])
        signals = [
            self._model.no_signal(len(canvas.tokens)) if canvas.signal is None else canvas.signal
            for canvas in canvases.values()
        ]
        attend = _Attention(self, spans, causal=False)
        hidden = self._model.denoise(tokens, torch.cat(signals), self._positions(spans), attend)
        ends = np.cumsum([end - begin for _, begin, end in spans]).tolist()
        return {slot: hidden[last - end + begin : last] for (slot, begin, end), last in zip(spans, ends, strict=True)}

    def clear(self) -> None:
        """Take back every page."""
        for slot in list(self.length):
            self.release(slot)

    def release(self, slot: int) -> None:
        """Take back a slot's pages."""
        self.length.pop(slot, None)
        for cache in self.of.values():
            cache.release(slot)

    def _spans(self, more: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """Each slot with the begin and end of its next tokens; pages are reserved for them."""
        spans = [(slot, self.length.get(slot, 0), self.length.get(slot, 0) + num) for slot, num in more.items()]
        slots, ends = np.array([slot for slot, *_ in spans], np.int32), np.array([end for *_, end in spans])
        for slot, begin, _ in spans:
            self.length[slot] = begin
        for cache in self.of.values():
            cache.reserve(slots, ends)
        return spans

    def _positions(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        return torch.from_numpy(positions).to(self._model.embedding.device)

    def first_seen(self, sliding: bool, text: int) -> int:
        """The first position visible to a canvas behind `text` tokens, or to their next token."""
        return max(0, text - self._model.config.window + 1) if sliding else 0


class _Attention:
    """Attention of spans of slots: of text, causal, or of canvases, to all that the window shows."""

    def __init__(self, cache: CanvasCache, spans: Sequence[tuple[int, int, int]], causal: bool) -> None:
        self._cache, self._causal = cache, causal
        self._seen = {kind: [self._look(kind, *span) for span in spans] for kind in cache.of}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._cache
        sliding, index = cache.model.config.layers[layer].sliding, cache.index[layer]
        pages = cache.of[sliding]
        keys, values = (x[index].view(-1, *k.shape[1:]) for x in (pages.keys, pages.values))
        reads, low = [], 0
        for places, num, mask in self._seen[sliding]:
            rows = slice(low, low + num)
            own = places[len(places) - num :]
            keys[own], values[own] = k[rows], v[rows]
            one, all_keys, all_values = (x.transpose(0, 1)[None] for x in (q[rows], keys[places], values[places]))
            read = scaled_dot_product_attention(one, all_keys, all_values, attn_mask=mask, scale=1.0, enable_gqa=True)
            reads.append(read[0].transpose(0, 1))
            low += num
        return torch.cat(reads)

    def _look(self, sliding: bool, slot: int, begin: int, end: int) -> tuple[Tensor, int, Tensor | None]:
        """The places of the keys that a span sees, its own last; their number; a mask, or None: all see all."""
        pages, first = self._cache.of[sliding], self._cache.first_seen(sliding, begin)
        positions, device = np.arange(first, end), pages.keys.device
        places = torch.from_numpy(pages.places(np.full(len(positions), slot, np.int32), positions)).to(device)
        if not self._causal:
            return places, end - begin, None
        query = torch.arange(begin, end, device=device)[:, None]
        key = torch.arange(first, end, device=device)
        mask = key <= query
        if sliding:
            mask &= query - key < self._cache.model.config.window
        return places, end - begin, mask


@dataclass(slots=True, eq=False)
class Canvas:
    """A canvas being denoised."""

    tokens: Tensor  # [canvas]
    signal: Tensor | None = None  # the last step's self-conditioning, [canvas, hidden]
    likeliest: list[Tensor] = field(default_factory=list)  # arg-max tokens of its last steps
    steps: int = 0
    done: bool = False

    @property
    def answer(self) -> Tensor:
        """The finished canvas: the likeliest tokens of its last step, not the drawn ones."""
        return self.likeliest[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A step's result for positions of a canvas, [rows] each."""

    drawn: Tensor
    likeliest: Tensor
    entropy: Tensor  # nats


def read(logits: Tensor, canvas: Canvas, rule: Renoise, chance: Chance, first: int = 0) -> tuple[Reading, Tensor]:
    """A step's result for logits [rows, vocab] of positions from `first` on (1.2).

    Also the logits at the step's temperature, which condition the next step (CanvasModel.signal_of).
    """
    remaining = max(0, rule.max_steps - canvas.steps)
    scaled = logits / (rule.t_min + (rule.t_max - rule.t_min) * (remaining / rule.max_steps))
    logs = scaled.log_softmax(dim=-1)
    probabilities = logs.exp()
    drawn = chance.draw(probabilities, first)
    entropy = -(logs.clamp(min=torch.finfo(logs.dtype).min) * probabilities).sum(dim=-1)
    return Reading(drawn, scaled.argmax(dim=-1), entropy), scaled


def settle(canvas: Canvas, reading: Reading, vocab: int, rule: Renoise, chance: Chance) -> None:
    """Apply a step's result to a whole canvas: accept, renoise, and decide whether it is done (1.2)."""
    accepted = accept(reading.entropy, rule.entropy_bound)
    noise = chance.noise(len(reading.drawn), vocab)
    canvas.tokens = torch.where(accepted, reading.drawn, noise)
    likeliest, before = reading.likeliest, canvas.likeliest[max(0, len(canvas.likeliest) - rule.stability) :]
    stable = len(before) >= rule.stability and all(torch.equal(likeliest, past) for past in before)
    canvas.likeliest = [*before, likeliest]
    canvas.steps += 1
    canvas.done = canvas.steps >= rule.max_steps or bool(stable and reading.entropy.mean() < rule.confidence)


def advance(canvas: Canvas, model: CanvasModel, hidden: Tensor, rule: Renoise, chance: Chance) -> None:
    """Apply a step's final states [canvas, hidden], at most TILE rows of logits at once."""
    readings, signals = [], []
    for first in range(0, len(hidden), TILE):
        part, scaled = read(model.logits(hidden[first : first + TILE]), canvas, rule, chance, first)
        readings.append(part)
        signals.append(model.signal_of(scaled))
    whole = (torch.cat([getattr(part, name) for part in readings]) for name in ("drawn", "likeliest", "entropy"))
    settle(canvas, Reading(*whole), model.config.vocab, rule, chance)
    canvas.signal = torch.cat(signals)


def accept(entropy: Tensor, bound: float) -> Tensor:
    """Positions whose more certain ones' entropies sum to at most `bound`: at least one; [canvas] to the same."""
    ordered, order = entropy.sort(stable=True)
    chosen: Tensor = torch.zeros_like(entropy, dtype=torch.bool)
    chosen[order] = ordered.cumsum(dim=0) - ordered <= bound
    return chosen
