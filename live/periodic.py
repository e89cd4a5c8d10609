"""MaskKV on the device: prompt and response refreshed in turn; other steps compute what changed.

One request at a time, as published (full-sequence-diffusion.md 3.1). Layers store keys, values and outputs of attention
and feed-forward by position of the response; a step computes some rows and reads the rest. Layers keep chosen keys of
the prompt (3.5), which other steps leave out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from ..engine.commits import CommitDraws, ScheduledCommits
from ..engine.policies.dllm_cache import RUN
from ..engine.policies.maskkv import head_budgets, layer_budgets
from ..engine.rows.passes import RowPosition
from ..engine.spec import Policy
from ..engine.step import Phase, StepOutcome, StepPlan
from ..kernels.qk_norm_rope import Turns
from ..kernels.ragged_paged_attention import WHOLE, Sequences, ragged_paged_attention
from .cache import PagedCache
from .forward import DeviceClock, Sampled
from .full_sequence import FullSequenceExecutor, FullSequenceForward, lengths
from .model import Decoder, Layer
from .prompts import Prompts

SAMPLES, SAMPLE_LENGTH = 4, 128  # to measure layers' importance
GRID = 2**20  # similarities are rounded to 1 / GRID
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def least_alike(fresh: Tensor, old: Tensor, num: int) -> Tensor:
    """The `num` rows of [rows, kv_heads, head_dim] with the lowest cosines, ascending; ties go low.

    In fp64: unchanged rows have cosine 1 in any dimension.
    """
    alike = cosine_similarity(fresh.flatten(1).double(), old.flatten(1).double(), dim=1)
    return (alike * GRID).round().sort(stable=True).indices[:num].sort().values


def votes_of(q: Tensor, k: Tensor, prompt: int) -> Tensor:
    """The attention [kv_heads, keys] that each key gets from the masks, all positions after the prompt (3.2, 3.4).

    Summed over the query heads of a KV head, which share a budget. One KV head at a time bounds memory.
    """
    votes = []
    for queries, keys in zip(q[prompt:].chunk(k.shape[1], dim=1), k.unbind(1), strict=True):
        scores = queries.float() @ keys.float().T * k.shape[2] ** -0.5  # [masks, heads, keys]
        votes.append(scores.softmax(-1).sum((0, 1)))
    return torch.stack(votes)


@torch.inference_mode()
def importance_of(model: Decoder, prompts: Prompts) -> Floats:
    """1 - cos of each layer's input before and after attention, [layers], mean over prompts' tokens (eq. 8)."""
    device = model.embedding.weight.device
    positions = torch.arange(SAMPLE_LENGTH, device=device)
    importance = np.zeros(model.config.layers)
    for request in range(SAMPLES):
        x, turns = model.enter(torch.from_numpy(prompts(request, SAMPLE_LENGTH)).long().to(device), positions)
        for layer in cast(list[Layer], list(model.layers)):
            q, k, v = (rows.transpose(0, 1)[None] for rows in layer.project(x, turns))
            read = scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
            after = x + layer.output(read.reshape(len(x), -1))
            importance[layer.index] += 1.0 - float(cosine_similarity(x.float(), after.float(), dim=1).mean())
            x = after + layer.feed_forward(after)
    return np.maximum(importance / SAMPLES, 0.0)


# Heads may keep different keys, so a request's pages are cut into runs of RUN rows of one KV head: the attention kernel
# sees a run as a page, and a head as a sequence. Layers keep different numbers of keys, and share one supply of runs
# (full-sequence-diffusion.md 3.3, 3.4).
class Runs:
    """The runs of some pages of `all_keys`, to be taken."""

    def __init__(self, cache: PagedCache, pages: Ints) -> None:
        _, page_size, kv_heads, _ = cache.all_keys.shape
        in_page = page_size * kv_heads // RUN
        self._runs = (pages[:, None] * in_page + np.arange(in_page)).reshape(-1)
        self._used = 0

    def take(self, rows: Sequence[int]) -> list[Ints]:
        """Runs for lists of these numbers of rows."""
        runs = []
        for count in rows:
            first, self._used = self._used, self._used + -(-count // RUN)
            # The engine counts every run.
            assert self._used <= len(self._runs), f"{self._used} runs wanted, and there are {len(self._runs)}"
            runs.append(self._runs[first : self._used])
        return runs


def places(runs: Sequence[Ints], num: int) -> Ints:
    """Places of rows 0 to `num` of each list, among one head's rows, [num, lists]."""
    i = np.arange(num)
    return np.stack([indices[i // RUN] * RUN + i % RUN for indices in runs], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """The keys that queries see, each KV head a sequence: the prompt's, then from the next run the response's."""

    table: Tensor  # [kv_heads, runs] int32
    history: Tensor  # [kv_heads] int32, keys of the prompt
    listed: Tensor  # [kv_heads, RUN - 1 + response] bool

    @classmethod
    def of_runs(
        cls, prompt: Sequence[Ints], counts: Ints, response: Sequence[Ints], num: int, device: torch.device
    ) -> "Visible":
        """Each head's first counts[h] prompt rows, and `num` of its response."""
        joined = [np.concatenate(lists) for lists in zip(prompt, response, strict=True)]
        table = np.full((len(joined), max(1, *map(len, joined))), -1, np.int32)
        for row, runs in zip(table, joined, strict=True):
            row[: len(runs)] = runs
        column = np.arange(RUN - 1 + num) - (-counts % RUN)[:, None]
        listed = (column >= 0) & (column < num)
        arrays = (table, counts.astype(np.int32), listed)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(slots=True, eq=False)
class LayerCache:
    """A request's places in one layer, as rows of one head, and what the layer added to its response."""

    response: Tensor  # [response, kv_heads]
    added: tuple[Tensor, Tensor]  # [response, hidden], by attention and feed-forward
    full: Visible  # for steps over the prompt
    runs: list[Ints]  # of the response
    cheap: Visible | None = None  # for others; None: heads have not chosen
    chosen: tuple[Tensor, Tensor, Tensor] | None = None  # positions, heads and places of the prompt's kept keys


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of a step: positions from `first` on."""

    first: int
    prompt: bool  # all of the prompt
    response: bool  # all of the response
    num_changed: int  # of the response: all, or the most changed


class PeriodicForward(FullSequenceForward):
    def __init__(self, model: Decoder, cache: PagedCache, policy: Policy) -> None:
        super().__init__(model, cache, policy)
        one_head = (-1, RUN, 1, model.config.head_dim)
        self._keys, self._values = cache.all_keys.view(one_head), cache.all_values.view(one_head)
        self.importance: Floats | None = None  # divides MaskKV's budget
        # Of the current request:
        self._layers: list[LayerCache] = []
        self._budgets = np.zeros(0, np.int64)  # prompt keys of a layer's head
        self._prompt = self._length = 0
        self._prompt_places = torch.zeros(0)  # [prompt, kv_heads], shared by layers, while computed

    @property
    def attended(self) -> tuple[Tensor, Tensor]:
        return self._keys, self._values

    def prepare(self, prompts: Prompts) -> None:
        """Measure layers' importance (3.3)."""
        if self.importance is None:
            self.importance = importance_of(self.model, prompts)

    def open(self, slot: int, prompt: int, length: int) -> None:
        """Divide a new request's pages."""
        config, cache, response = self.model.config, self.cache, length - prompt
        self._prompt, self._length = prompt, length
        pages = cache.table[slot][cache.table[slot] >= 0]
        self._supply = Runs(cache, (np.arange(config.layers)[:, None] * cache.num_pages + pages).reshape(-1))
        heads, weight = config.kv_heads, self.model.embedding.weight
        every = np.full(heads, prompt)
        assert self.importance is not None, "prepare comes first"
        self._budgets = layer_budgets(self._rule, self.importance, prompt)
        shared = Runs(cache, np.arange(cache.scratch, len(cache.all_keys))).take(every.tolist())
        self._prompt_places = self._on_device(places(shared, prompt))
        self._layers = []
        for _ in range(config.layers):
            runs = self._supply.take([response] * heads)
            added = weight.new_empty(response, config.hidden), weight.new_empty(response, config.hidden)
            visible = Visible.of_runs(shared, every, runs, response, self.device)
            self._layers.append(LayerCache(self._on_device(places(runs, response)), added, visible, runs))

    @torch.inference_mode()
    def advance(self, tokens: Ints, step: Step, sampled: Ints) -> Sampled:
        """tokens: of positions from step.first on; sampled: rows of these."""
        inputs = self.inputs({"tokens": tokens, "sampled": sampled})
        clock = DeviceClock(self.device)
        positions = torch.arange(step.first, self._length, device=self.device)
        x, turns = self.model.enter(inputs["tokens"], positions)
        for layer, cache in zip(self.layers, self._layers, strict=True):
            x = self._layer(layer, cache, x, turns, step)
        return self.read(self.model.norm(x[inputs["sampled"]]), clock)

    def _layer(self, layer: Layer, cache: LayerCache, x: Tensor, turns: Turns, step: Step) -> Tensor:
        """[rows, hidden]."""
        rows, target = self._rows(layer, cache, x, step)
        attention, feed_forward = cache.added
        if not len(rows):
            return x + attention + feed_forward
        q, k, v = layer.project(x[rows], Turns(turns.cos[rows], turns.sin[rows]))
        self._write(k.flatten(0, 1), v.flatten(0, 1), target.reshape(-1))
        keys = cache.full
        if not step.prompt:
            assert cache.cheap is not None, "the first step computes the prompt"
            keys = cache.cheap
        read = self._read(q, keys)
        if step.prompt:
            self._keep_chosen(layer.index, cache, q, k, v)
        x = x + _completed(attention, layer.output(read), rows, len(x))
        return x + _completed(feed_forward, layer.feed_forward(x[rows]), rows, len(x))

    def _write(self, k: Tensor, v: Tensor, target: Tensor) -> None:
        """Store rows of one head, [rows, head_dim], at places [rows]."""
        for store, rows in ((self._keys, k), (self._values, v)):
            store.view(-1, store.shape[-1])[target] = rows

    def _rows(self, layer: Layer, cache: LayerCache, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Computed rows of x, ascending, and their KV's places, [rows, kv_heads]."""
        first = self._prompt - step.first
        rows = torch.arange(first if step.prompt else 0, device=self.device)
        target = self._prompt_places[: len(rows)]
        if step.response:
            changed = torch.arange(len(x) - first, device=self.device)
        else:
            changed = self._changed(layer, cache, x[first:], step.num_changed)
        return torch.cat([rows, first + changed]), torch.cat([target, cache.response[changed]])

    def _changed(self, layer: Layer, cache: LayerCache, response: Tensor, num: int) -> Tensor:
        """The response's most changed rows, ascending; stores all values."""
        if not num:
            return torch.arange(0, device=self.device)
        values = self._values.view(-1, self._values.shape[-1])
        fresh, old = layer.values(response), values[cache.response]
        values[cache.response] = fresh
        return least_alike(fresh, old, num)

    def _read(self, q: Tensor, keys: Visible) -> Tensor:
        """Attention's output, [rows, heads x head_dim]; a KV head is a sequence."""
        n, heads = len(q), len(keys.table)
        by_head = q.view(n, heads, -1, q.shape[2]).transpose(0, 1)
        start = n * torch.arange(heads + 1, dtype=torch.int32, device=self.device)
        positions = start.new_zeros(heads * n)  # which do not matter
        sequences = Sequences(keys.table, start, positions, keys.history, listed=keys.listed, block_length=WHOLE)
        q = by_head.reshape(heads * n, -1, q.shape[2])
        read = ragged_paged_attention(q, self._keys, self._values, sequences)
        return read.view(by_head.shape).transpose(0, 1).reshape(n, -1)

    def _keep_chosen(self, index: int, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the chosen KV of the prompt."""
        if cache.chosen is None:
            self._choose(index, cache, q, k)
        assert cache.chosen is not None
        positions, heads, target = cache.chosen
        self._write(k[positions, heads], v[positions, heads], target)

    def _choose(self, index: int, cache: LayerCache, q: Tensor, k: Tensor) -> None:
        """Choose each head's keys of the prompt by votes; ties go low.

        The host waits for the votes, once a layer and request: key counts decide places.
        """
        prompt, length, heads = self._prompt, self._length, k.shape[1]
        budget = int(self._budgets[index])
        counts = np.full(heads, budget)
        order = torch.arange(prompt, device=self.device).expand(heads, -1)
        if budget < prompt < length:
            votes = votes_of(q, k, prompt)
            to_prompt, to_masked = votes[:, :prompt].sum(1), votes[:, prompt:].sum(1)
            preference = (to_prompt / (to_prompt + to_masked)).double().cpu().numpy()
            counts = head_budgets(self._rule, preference, budget, prompt)
            order = votes[:, :prompt].sort(dim=1, descending=True, stable=True).indices
        runs = self._supply.take(counts.tolist())
        of_heads = [places([indices], int(count))[:, 0] for indices, count in zip(runs, counts, strict=True)]
        cache.chosen = (
            torch.cat([keys[:count].sort().values for keys, count in zip(order, counts.tolist(), strict=True)]),
            self._on_device(np.repeat(np.arange(heads), counts)),
            self._on_device(np.concatenate(of_heads)),
        )
        cache.cheap = Visible.of_runs(runs, counts, cache.runs, length - prompt, self.device)

    def _on_device(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)


def _completed(stored: Tensor, fresh: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """What a part of a layer adds to all rows: `fresh`, which is stored, where computed."""
    without = num_rows - len(stored)  # the prompt's rows come first and are computed
    stored[rows[without:] - without] = fresh[without:]
    return torch.cat([fresh[:without], stored])


class PeriodicExecutor(FullSequenceExecutor):
    _forward: PeriodicForward

    def __init__(
        self, forward: PeriodicForward, policy: Policy, prompts: Prompts, draws: CommitDraws | ScheduledCommits | None
    ) -> None:
        super().__init__(forward, policy, prompts, draws)
        forward.prepare(prompts)
        self._opened = -1

    def _decode(self, plan: StepPlan) -> StepOutcome:
        assert len(plan.requests) == 1, "batches of one"
        order = np.zeros(1, np.intp)
        prompt, end, start = (x.astype(np.int64) for x in (plan.prompt, plan.end, plan.block_start))
        length = lengths(prompt, end, self._block)
        slot, request, phase = (int(x[0]) for x in (plan.slots, plan.requests, plan.phases))
        self._admit(
            plan, order, RowPosition(prompt, length, start, step=start * 0, block_step=start * 0, block=self._block)
        )
        if not length[0]:
            return StepOutcome(0.0, np.zeros_like(plan.window), 0.0)
        if request != self._opened:
            self._forward.open(slot, int(prompt[0]), int(length[0]))
            self._opened = request

        of_prompt = phase in (Phase.FULL, Phase.REFRESH_PROMPT)
        of_response = phase in (Phase.FULL, Phase.REFRESH_RESPONSE)
        first = 0 if of_prompt else int(prompt[0])
        changed = int(plan.num_tokens[0]) - (int(prompt[0]) if of_prompt else 0)
        sampled = np.arange(int(start[0]), int(length[0])) - first
        out = self._forward.advance(
            self._tokens[slot, first : length[0]].astype(np.int64),
            Step(first, of_prompt, of_response, changed),
            sampled,
        )
        tokens, confidence = np.zeros(plan.window.shape, np.int64), np.zeros(plan.window.shape, np.float32)
        if plan.window[0, 0]:
            tokens[0], confidence[0] = out.tokens[: self._block], out.confidence[: self._block]
        return StepOutcome(0.0, self._decide(plan, tokens, confidence), out.device)
