"""DiffusionGemma's canvases: text is encoded into pages, and canvases are denoised after it.

Full layers keep all text, sliding layers what a window still sees. A canvas's keys follow the text; each step and the
finished canvas's causal encoding overwrite them. Canvases stay on the device; the host gets what it needs to decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.chance import TOKEN, key, uniform
from ..kernels.qk_norm_rope import Pages
from ..kernels.ragged_paged_attention import WHOLE, ragged_paged_attention
from ..kernels.read_logits import read_logits
from .cache import PagedCache, PageShape
from .canvas_model import CanvasModel, Renoise
from .forward import on_device, sequences_of

LOGITS_BYTES = 1 << 30  # of logits at once; each product reads the whole embedding
Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class KeyedChance:
    """Numbers keyed by request, position and turn: batching does not change them."""

    def __init__(self, seed: int, request: int, begin: int, length: int) -> None:
        self._about = seed, TOKEN, request, np.arange(begin, begin + length)
        self._noises = 0

    def noise(self, vocab: int) -> Ints:
        tokens = (uniform(key(*self._about, 2 * self._noises)) * vocab).astype(np.int64)
        self._noises += 1
        return tokens

    def uniform(self) -> Floats:
        return uniform(key(*self._about, 2 * self._noises - 1))


class Turn(NamedTuple):
    """A canvas's input to a step."""

    temperature: float
    uniform: Floats  # [canvas]
    noise: Ints  # [canvas] tokens of positions that are not accepted


class Reading(NamedTuple):
    """A step's result for a canvas, on the host."""

    likeliest: Ints  # [canvas]
    entropy: float  # nats, mean of all positions


class CanvasCache:
    """Sequences' pages by slot, for sliding and for full layers, and their canvases."""

    def __init__(
        self, model: CanvasModel, num_pages: tuple[int, int], page_size: int, device: str, dtype: torch.dtype
    ) -> None:
        """num_pages: of sliding, of full layers."""
        config = model.config
        self.model, self.page_size = model, page_size
        self.caches: dict[bool, PagedCache] = {}
        self.index: list[int] = []  # each layer's index among its kind
        for sliding, pages in zip((True, False), num_pages, strict=True):
            kind = [layer for layer in config.layers if layer.sliding == sliding]
            assert len({(layer.kv_heads, layer.head_dim) for layer in kind}) <= 1, "layers of a kind are alike"
            if kind:
                shape = PageShape(len(kind), kind[0].kv_heads, kind[0].head_dim)
                self.caches[sliding] = PagedCache(shape, pages, page_size, device, dtype)
        counts = {True: 0, False: 0}
        for layer in config.layers:
            self.index.append(counts[layer.sliding])
            counts[layer.sliding] += 1
        self.length: dict[int, int] = {}  # tokens of text by slot
        self._device = model.embedding.device
        # By slot; the last is no slot's.
        self._tokens = torch.zeros(1, config.canvas_length, dtype=torch.int64, device=self._device)
        self._signals = torch.zeros(1, config.canvas_length, config.hidden, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def encode(self, texts: Mapping[int, Tensor]) -> None:
        """Append text to slots causally; free the pages before every window."""
        spans = self._spans({slot: len(tokens) for slot, tokens in texts.items()})
        inputs = on_device(self._layout(spans, causal=True), self._device)
        self.model.encode(torch.cat(list(texts.values())), inputs["positions"], _Attention(self, inputs, causal=True))
        for slot, _, end in spans:
            self.length[slot] = end
            if True in self.caches:
                self.caches[True].release_before(slot, max(0, end - self.model.config.window + 1))

    @torch.inference_mode()
    def begin(self, slot: int, tokens: Ints) -> None:
        self._make_room(slot + 1)
        self._tokens[slot] = torch.from_numpy(tokens).to(self._device)
        self._signals[slot] = 0

    @torch.inference_mode()
    def states(self, slots: Sequence[int]) -> Tensor:
        """Final states of canvases, [slots, canvas, hidden]."""
        hidden = self._states(on_device(self._layout(self._canvases(slots)), self._device))
        return hidden.view(len(slots), *self._signals.shape[1:])

    @torch.inference_mode()
    def denoise(self, turns: Mapping[int, Turn]) -> dict[int, Reading]:
        """One step of canvases (production-dllm-serving.md 1.2)."""
        answers = self._run(self._arrays(turns))
        return {
            slot: Reading(row[:-1].astype(np.int64), float(row[-1])) for slot, row in zip(turns, answers, strict=True)
        }

    def _arrays(self, turns: Mapping[int, Turn]) -> Arrays:
        arrays = self._layout(self._canvases(list(turns)))
        arrays["temperature"] = np.array([turn.temperature for turn in turns.values()], np.float64)
        arrays["uniform"] = np.array([turn.uniform for turn in turns.values()], np.float64).reshape(-1)
        arrays["noise"] = np.array([turn.noise for turn in turns.values()], np.int64).reshape(-1)
        return arrays

    def _run(self, arrays: Arrays) -> Floats:
        answers: Floats = self._step(on_device(arrays, self._device)).cpu().numpy()
        return answers

    def _step(self, inputs: "dict[str, Tensor]") -> Tensor:
        """Likeliest tokens and mean entropy, [canvases, canvas + 1] in fp64."""
        length, slots = self._tokens.shape[1], inputs["slots"]
        hidden = self._states(inputs)
        uniform = inputs["uniform"].float()
        temperature = inputs["temperature"].float()[:, None].expand(-1, length).contiguous().view(-1)
        at_once = max(1, LOGITS_BYTES // (len(self.model.embedding) * hidden.element_size() * length)) * length
        read, signals = [], []
        for low in range(0, len(hidden), at_once):
            rows = slice(low, low + at_once)
            logits = self.model.raw_logits(hidden[rows])
            read.append(read_logits(logits, temperature[rows], uniform[rows], self.model.config.softcap))
            signals.append(self.model.signal_of(logits))  # read_logits turned logits into probabilities
        drawn, likeliest, entropy = (torch.cat(parts).view(-1, length) for parts in zip(*read, strict=True))
        accepted = accept(entropy, self.model.config.renoise.entropy_bound)
        self._tokens[slots] = torch.where(accepted, drawn, inputs["noise"].view(-1, length))
        self._signals[slots] = torch.cat(signals).view(-1, *self._signals.shape[1:])
        return torch.cat([likeliest.double(), entropy.mean(1, keepdim=True).double()], 1)

    def _states(self, inputs: "dict[str, Tensor]") -> Tensor:
        tokens, signals = (x[inputs["slots"]].flatten(0, 1) for x in (self._tokens, self._signals))
        return self.model.denoise(tokens, signals, inputs["positions"], _Attention(self, inputs, causal=False))

    def clear(self) -> None:
        for slot in list(self.length):
            self.release(slot)

    def release(self, slot: int) -> None:
        self.length.pop(slot, None)
        for cache in self.caches.values():
            cache.release(slot)

    def _make_room(self, slots: int) -> None:
        have = len(self._tokens) - 1
        if slots > have:
            extra = max(slots, 2 * have) - have
            self._tokens, self._signals = (
                torch.cat([x, x.new_zeros(extra, *x.shape[1:])]) for x in (self._tokens, self._signals)
            )

    def _canvases(self, slots: Sequence[int]) -> "list[Span]":
        self._make_room(max(slots, default=-1) + 1)
        return self._spans(dict.fromkeys(slots, self.model.config.canvas_length))

    def _spans(self, counts: Mapping[int, int]) -> "list[Span]":
        """Each slot with the begin and end of its next tokens, whose pages are reserved."""
        spans = [(slot, self.length.get(slot, 0), self.length.get(slot, 0) + num) for slot, num in counts.items()]
        for slot, begin, end in spans:
            self.length[slot] = begin
            for cache in self.caches.values():
                cache.reserve(np.array([slot], np.int32), np.array([end]))
        return spans

    def _layout(self, spans: "Sequence[Span]", causal: bool = False) -> Arrays:
        """The spans' positions and places; causal: no row sees a later one."""
        slots, begins, ends = np.array(spans, np.int64).reshape(-1, 3).T
        counts = ends - begins
        starts = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(starts[-1]) - starts[row] + begins[row]
        arrays: Arrays = {"slots": slots, "positions": positions, "query_start": starts}
        arrays["history"], arrays["listed"] = ends, np.zeros((len(spans), 1), np.bool_)
        if not causal:
            arrays["history"] = begins
            arrays["listed"] = np.ones((len(spans), self.model.config.canvas_length), np.bool_)
        for kind, cache in self.caches.items():
            arrays[f"table {kind}"] = cache.tables(slots.astype(np.int32), ends)
            arrays[f"places {kind}"] = cache.places(slots[row].astype(np.int32), positions)
        return arrays


Span = tuple[int, int, int]  # a slot, and its next tokens' begin and end


class _Attention:
    """Causal attention of text, or of canvases to all that the window shows."""

    def __init__(self, cache: CanvasCache, inputs: Mapping[str, Tensor], causal: bool) -> None:
        self._cache, self._inputs = cache, inputs
        self._block = 1 if causal else WHOLE

    def pages(self, layer: int) -> Pages:
        sliding, index = self._cache.model.config.layers[layer].sliding, self._cache.index[layer]
        pages = self._cache.caches[sliding]
        return Pages(pages.keys[index], pages.values[index], self._inputs[f"places {sliding}"])

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        config, pages = self._cache.model.config, self.pages(layer)
        sliding = config.layers[layer].sliding
        inputs = {**self._inputs, "page_table": self._inputs[f"table {sliding}"]}
        sequences = sequences_of(inputs, self._block)
        return ragged_paged_attention(q, pages.keys, pages.values, sequences, sliding * config.window, scale=1.0)


@dataclass(slots=True, eq=False)
class Canvas:
    chance: KeyedChance
    likeliest: list[Ints] = field(default_factory=list)  # arg-max tokens of its last steps
    steps: int = 0
    done: bool = False

    @property
    def answer(self) -> Ints:
        """The last step's likeliest tokens, not the drawn ones."""
        return self.likeliest[-1]

    def turn(self, vocab: int, rule: Renoise) -> Turn:
        share = max(0, rule.max_steps - self.steps) / rule.max_steps
        return Turn(rule.t_min + (rule.t_max - rule.t_min) * share, self.chance.uniform(), self.chance.noise(vocab))

    def settle(self, reading: Reading, rule: Renoise) -> None:
        """Count a step; decide whether it was the last (production-dllm-serving.md 1.2)."""
        before = self.likeliest[max(0, len(self.likeliest) - rule.stability) :]
        stable = len(before) >= rule.stability and all(np.array_equal(reading.likeliest, past) for past in before)
        self.likeliest = [*before, reading.likeliest]
        self.steps += 1
        self.done = self.steps >= rule.max_steps or bool(stable and reading.entropy < rule.confidence)


def accept(entropy: Tensor, bound: float) -> Tensor:
    """Accept positions, most certain first, while earlier entropies sum to at most `bound`; [.., canvas]."""
    ordered, order = entropy.sort(dim=-1, stable=True)
    chosen = ordered.cumsum(dim=-1) - ordered <= bound
    return torch.zeros_like(chosen).scatter(-1, order, chosen)
