"""The executor of full-sequence models: full passes, packing passes, passes over the block alone.

A request's own pages hold KV for later steps: of all positions with FastCache, kept ones with SparseCache. A step's own
go to scratch pages, which every layer overwrites.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..engine.commits import CommitDraws, ScheduledCommits
from ..engine.engine import Limits
from ..engine.errors import PolicyError
from ..engine.policies.dllm_cache import RUN
from ..engine.policies.fast_dllm import FastCache
from ..engine.policies.llada import NoCache
from ..engine.policies.maskkv import MaskKV
from ..engine.policies.sparse_dllm import SparseCache
from ..engine.request import Request
from ..engine.rows.passes import RowPosition
from ..engine.spec import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from ..kernels.pooled_topk_pack import Choice, pooled_topk_pack
from ..kernels.qk_norm_rope import Pages
from ..kernels.ragged_paged_attention import WHOLE, ragged_paged_attention
from .cache import Ints, PagedCache
from .choice import choose
from .config import ModelConfig
from .evicting import Array, Inputs
from .executor import ModelExecutor, steps_of
from .forward import Batch, Forward, sequences_of
from .model import Decoder
from .prompts import Prompts
from .refused import refuse

# By cache; an outside one is a subclass.
PASSES: Mapping[type, frozenset[Phase]] = {
    MaskKV: frozenset({Phase.FULL, Phase.REFRESH_PROMPT, Phase.REFRESH_RESPONSE, Phase.PARTIAL}),
    SparseCache: frozenset({Phase.FULL, Phase.PACK, Phase.REUSE}),
    FastCache: frozenset({Phase.FULL, Phase.REUSE}),
    NoCache: frozenset({Phase.FULL}),
}


def passes_of(policy: Policy) -> frozenset[Phase]:
    """The passes of a policy's cache; PolicyError for an unknown one."""
    kind = next((kind for kind in type(policy.cache).__mro__ if kind in PASSES), None)
    if kind is None:
        names = ", ".join(kind.__name__ for kind in PASSES)
        raise PolicyError(f"{policy.name}: dsim live cannot run {type(policy.cache).__name__}: expected one of {names}")
    return PASSES[kind]


def check_runs(policy: Policy, config: ModelConfig) -> None:
    """PolicyError unless the executor runs the policy on the model."""
    passes_of(policy)
    cache: Any = policy.cache  # one of the kinds in PASSES, each with its own fields
    batching, page = policy.batching, policy.memory.page_size
    one_by_one = batching.pads and batching.max_batch != 1
    reasons = {
        f"max_batch is {batching.max_batch}, and dsim live pads no batch: expected 1, or dllm-serve": one_by_one,
        "dsim live does not run dLLM-Cache: expected another, as maskkv": cache.keeps_outputs and not cache.votes,
    }
    if cache.votes:
        multiple, name = RUN // gcd(RUN, config.kv_heads), config.name
        outside = [layer for layer in cache.boundary if not -config.layers <= layer < config.layers]
        kind, is_all = type(cache).__name__, cache.logits == "all"
        runs = f"page_size is {page}, and pages of {name} (kv_heads {config.kv_heads}) are cut into runs of {RUN} keys"
        reasons |= {
            f"dsim live runs {kind} one request at a time: expected Static": not batching.pads,
            f"logits is all, and {kind} carries no prompt from step to step: expected block": is_all,
            f"{kind} carries no prompt from step to step, and rows of {name} predict the next one": config.shifted,
            f"{runs}: expected a multiple of {multiple}": page % multiple > 0,
            f"boundary is {cache.boundary}, and {name} has {config.layers} layers": bool(outside),
        }
    refuse(policy, reasons)


def pages_of_use(policy: Policy, limits: Limits, requests: Sequence[Request]) -> tuple[int, int]:
    """Pages that requests may hold at once, and the largest step's scratch pages."""
    page = policy.memory.page_size
    batch = min(limits.max_batch, len(requests))
    prompt = np.array([r.input_length for r in requests], np.int64)
    length = lengths(prompt, prompt + np.array([r.limit for r in requests]), policy.block_length)
    cache: Any = policy.cache
    pages = -(-cache.held(prompt, length, 0) // page)
    longest = min(int(length.max()), limits.context_limit)
    if cache.votes:  # the computed prompt, with a head's own runs
        longest += RUN - 1
    scratch = 0 if cache.in_place else batch * max(1, -(-longest // page))
    if (tokens := policy.batching.most_tokens) is not None:
        scratch = min(scratch, batch + tokens // page)
    return min(limits.num_pages, batch * int(pages.max())), scratch


def lengths(prompt: Array, end: Array, block: int) -> Array:
    """Tokens of the prompt, and of the output in whole blocks."""
    total: Array = prompt + -(-(end - prompt) // block) * block
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Pass(Batch):
    """`page_table` and `places` are the first layer's.

    pack: of the first sequences, which keep keys: the batch's rows of their blocks (`block_rows`), where each block's
    begin (`block_query_start`), the block's start in its sequence (`block_start`), and the number (`num_kept`) and
    pages (`own_pages`) of kept keys.
    """

    pack: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {**Batch.arrays(self), **self.pack}


class FullSequenceForward(Forward):
    def __init__(self, model: Decoder, cache: PagedCache, policy: Policy) -> None:
        # max_prefill_tokens also bounds rows of logits.
        super().__init__(model, cache, policy.unmasking.temperature or 1.0, policy.batching.max_prefill_tokens)
        self._rule: Any = policy.cache

    def hidden(self, inputs: Inputs, batch: Batch) -> Tensor:
        cache, table, places = self.cache, inputs["page_table"], inputs["places"]
        # Layers have own pages, and share scratch pages: what is added to a page and a place, by layer.
        inputs["page_step"] = ((table >= 0) & (table < cache.num_pages)).int() * cache.num_pages
        slots = cache.num_pages * cache.page_size
        inputs["place_step"] = (places < slots).long() * slots
        return super().hidden(inputs, batch)

    def pages_of(self, layer: int, inputs: Inputs) -> Pages:
        places = inputs["places"] + layer * inputs["place_step"]
        return Pages(self.cache.all_keys, self.cache.all_values, places)

    def attend(self, layer: int, q: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        assert isinstance(batch, Pass)
        cache = self.cache
        if batch.pack:
            num_packing = len(batch.pack["num_kept"])
            pages = self.pages_of(layer, inputs)
            rows = pages.slots[: batch.query_start[num_packing]]
            choice = Choice(
                query_start=inputs["block_query_start"],
                key_start=inputs["query_start"][: num_packing + 1],
                block_start=inputs["block_start"],
                num_kept=inputs["num_kept"],
                page_table=inputs["own_pages"],
                pool=self._rule.pool_width,
                shared=not self._rule.head_centric,
            )
            k, v = (store.flatten(0, 1)[rows] for store in pages[:2])
            pooled_topk_pack(q[inputs["block_rows"]], k, v, cache.keys[layer], cache.values[layer], choice)
        table = inputs["page_table"] + layer * inputs["page_step"]
        sequences = sequences_of(inputs, WHOLE)._replace(page_table=table)
        return ragged_paged_attention(q, cache.all_keys, cache.all_values, sequences)


class FullSequenceExecutor(ModelExecutor):
    """draws: None: the weights decide."""

    def __init__(
        self, forward: Forward, policy: Policy, prompts: Prompts, draws: CommitDraws | ScheduledCommits | None
    ) -> None:
        config = forward.model.config
        check_runs(policy, config)
        by_entropy = config.by_entropy or policy.unmasking.strategy == "entropy"
        forward.by_entropy = by_entropy and policy.unmasking.scheduled(policy)
        super().__init__(forward, policy, prompts, None, policy.block_length)
        self._rule: Any = policy.cache
        self._passes = passes_of(policy)
        self._deciding = draws
        self._kept: set[int] = set()  # requests that a pass kept keys of

    def _decode(self, plan: StepPlan) -> StepOutcome:
        # Packing sequences first: their keys are the first rows.
        has_block = plan.window[:, 0]
        packs = (plan.phases == Phase.PACK) & has_block
        order = np.argsort(~packs, kind="stable")
        num_packing = int(packs.sum())
        prompt, end, start, counts = (
            x[order].astype(np.int64) for x in (plan.prompt, plan.end, plan.block_start, plan.num_tokens)
        )
        position = RowPosition(
            prompt, lengths(prompt, end, self._block), start, step=start * 0, block_step=start * 0, block=self._block
        )
        self._check_passes(plan, order, position)
        self._admit(plan, order, position)
        if not counts.sum():  # no request has tokens
            return StepOutcome(0.0, np.zeros_like(plan.window), 0.0)

        slots, reuse = plan.slots[order], plan.phases[order] == Phase.REUSE
        begin = np.where(reuse, start, 0)
        query_start = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(order)), counts)
        positions = np.arange(query_start[-1]) - query_start[row] + begin[row]
        with_block = order[has_block[order]]
        first_rows = (query_start[:-1] + start - begin)[has_block[order]]
        blocks = first_rows[:, None] + np.arange(self._block)  # [sequences with a block, block]
        # Rows that predict the block: its own, or those before.
        predictors = np.maximum(blocks - self._shifted, query_start[:-1][has_block[order], None])
        num_kept = np.zeros_like(start)
        if self._rule.packs:
            num_kept = np.where(reuse | packs[order], self._rule.kept(position), 0)
        pack = {}
        if num_packing:
            pack = {
                "block_rows": blocks[:num_packing].reshape(-1),
                "block_query_start": np.arange(num_packing + 1) * self._block,
                "block_start": start[:num_packing],
                "num_kept": num_kept[:num_packing],
                "own_pages": self._cache.tables(slots[:num_packing], num_kept[:num_packing]),
            }
        if self._rule.in_place:
            places, table = self._cache.places(slots[row], positions), self._cache.tables(slots, position.length)
            history, listed = position.length, np.zeros((len(order), 1), np.bool_)
        else:
            table, first = self._tables(slots, counts, np.where(reuse, num_kept, 0))
            places = first[row] * self._cache.page_size + positions - begin[row]
            history, listed = np.where(reuse, num_kept, counts), self._behind(num_kept, reuse)
        sampled, answers = predictors.reshape(-1), np.arange(predictors.size).reshape(predictors.shape)
        if self._rule.logits == "all":
            sampled, answers = np.arange(len(row)), predictors
        out = self._forward.run(
            Pass(
                tokens=self._tokens[slots[row], positions].astype(np.int64),
                positions=positions,
                places=places,
                query_start=query_start,
                page_table=table,
                history=history,
                listed=listed,
                block_length=WHOLE,
                sampled=sampled,
                pack=pack,
            )
        )
        tokens, confidence = np.zeros(plan.window.shape, np.int64), np.zeros(plan.window.shape, np.float32)
        tokens[with_block], confidence[with_block] = out.tokens[answers], out.confidence[answers]
        return StepOutcome(0.0, self._decide(plan, tokens, confidence), out.device)

    def _check_passes(self, plan: StepPlan, order: npt.NDArray[np.intp], position: RowPosition) -> None:
        """PolicyError if an outside rule plans a pass that is not computed, or that reuses keys that no pass kept."""
        cache, keeping = type(self._rule).__name__, Phase.PACK if self._rule.packs else Phase.FULL
        self._kept &= self._slot_of.keys()
        for row, length, start in zip(order.tolist(), position.length.tolist(), position.start.tolist(), strict=True):
            phase, tokens = Phase(plan.phases[row]), int(plan.num_tokens[row])
            sizes = {Phase.FULL: {length}, Phase.PACK: {length}, Phase.REUSE: {self._block, length - start}}
            if self._rule.packs:
                sizes[Phase.REUSE] = {self._block}
            if phase != Phase.IDLE and (phase not in self._passes or tokens not in sizes[phase]):
                expected = ", ".join(f"{phase.name} of {sorted(sizes[phase])}" for phase in sorted(self._passes))
                raise PolicyError(
                    f"{self._policy.name}: {cache} plans {phase.name} of {tokens} tokens, expected {expected}"
                )
            request = int(plan.requests[row])
            if phase == keeping:
                self._kept.add(request)
            if phase == Phase.REUSE and request not in self._kept:
                raise PolicyError(
                    f"{self._policy.name}: {cache} plans REUSE before any pass that keeps keys, expected one first"
                )

    def _admit(self, plan: StepPlan, order: npt.NDArray[np.intp], position: RowPosition) -> None:
        """Give new requests their prompts and pages, and pages to those that gave theirs back between two blocks."""
        slots, requests = plan.slots[order], plan.requests[order]
        pairs = zip(slots.tolist(), requests.tolist(), strict=True)
        new = [i for i, (slot, request) in enumerate(pairs) if self._slot_of.get(request) != slot]
        if not new:
            return
        slots, requests = slots[new], requests[new]
        self._grow(int(slots.max()) + 1, int(position.length.max()))
        for slot, request, prompt in zip(slots.tolist(), requests.tolist(), position.prompt[new].tolist(), strict=True):
            self._own(slot, request, prompt)
        # Hidden states are no pages here.
        self._cache.reserve(slots, self._rule.held(position.prompt[new], position.length[new], 0))

    def _tables(self, slots: Ints, counts: Array, packed: Array) -> tuple[Ints, Array]:
        """Page tables, and each sequence's first scratch page; packed keys' pages come first.

        counts, packed: each sequence's rows and kept keys.
        """
        cache = self._cache
        num, num_packed = -(-counts // cache.page_size), -(-packed // cache.page_size)
        first = cache.scratch + np.cumsum(num) - num
        assert first[-1] + num[-1] <= len(cache.all_keys), "a step larger than its scratch pages"
        column = np.arange(max(1, int((num_packed + num).max())))
        packed_pages = cache.table[slots[:, None], np.minimum(column, cache.table.shape[1] - 1)]
        fresh = column - num_packed[:, None]
        table = np.where(fresh < 0, packed_pages, np.where(fresh < num[:, None], first[:, None] + fresh, -1))
        return table.astype(np.int32), first

    def _behind(self, num_kept: Array, reuse: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Where fresh keys follow packed ones, on the next page, [sequences, page_size + block]."""
        page = self._cache.page_size
        column = np.arange(page + self._block) - (-num_kept % page)[:, None]
        behind: npt.NDArray[np.bool_] = reuse[:, None] & (column >= 0) & (column < self._block)
        return behind

    def _decide(
        self, plan: StepPlan, tokens: npt.NDArray[np.int64], confidence: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.bool_]:
        """Which masks commit, by tokens and confidences [rows, block]; stores their tokens."""
        if self._deciding is not None:
            committed = self._deciding.draw(plan)
        else:
            masked = plan.window & (plan.status == MASKED)
            step = steps_of(plan.evaluations, masked)
            # A block alone cannot predict its first position; a full pass can.
            alone = self._rule.packs or self._rule.in_place
            first = step == 0 if alone and (self._shifted or self._forward.by_entropy) else None
            committed, tokens = choose(
                self._policy,
                tokens,
                confidence,
                masked,
                step,
                first=first,
                by_entropy=self._forward.by_entropy,
                mask_token=self._mask,
                threshold=plan.threshold,
            )
        rows, columns = np.nonzero(committed)
        self._tokens[plan.slots[rows], plan.block_start[rows] + columns] = tokens[rows, columns]
        return committed
