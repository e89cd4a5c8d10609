"""The executor: runs a plan on a decoder with a paged cache, and lets the weights, or a profile's draws, commit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..engine.chance import TOKEN, key
from ..engine.commits import CommitDraws, LawDraws
from ..engine.errors import ModelError, PolicyError
from ..engine.part import numbers_of
from ..engine.policies.focus import Focus
from ..engine.policies.sglang import JointThreshold as EditingUnmasking
from ..engine.policies.sglang import Rounds
from ..engine.policy import Policy
from ..engine.prefix import caches_prefixes
from ..engine.rows.blocks import visible
from ..engine.state import MASKED
from ..engine.step import Evicting, Phase, StepOutcome, StepPlan
from .choice import choose
from .config import ModelConfig
from .editing import JointThreshold, edit
from .evicting import Evict
from .forward import Batch, Forward, Sampled
from .padding import computes_whole_blocks
from .prompts import Prompts
from .texts import Bools, Texts


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceDelta:
    """How the importance of a decode step's masks grew from the first layer to the second, and what the step made of
    them. One entry a mask, row by row and in order of position."""

    row: npt.NDArray[np.intp]  # of the plan
    column: npt.NDArray[np.intp]  # of the block
    delta: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]


class _Made(NamedTuple):
    """A step's batch, and of its sampled rows the plan's row and the column of the block; `drawn`: commits that are."""

    batch: Batch
    rows: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    drawn: Bools | None = None


class ModelExecutor(Texts):
    """Runs plans. It keeps each sequence's tokens and pages by the engine's slot; the engine decides all else.

    watch: told of every decode step by a policy that evicts nothing; the step computes importances for it.
    eos: see `Texts`.
    """

    def __init__(
        self, forward: Forward, policy: Policy, prompts: Prompts, draws: CommitDraws | LawDraws | None,
        max_prefill_tokens: int, watch: Callable[[ImportanceDelta], None] | None = None, eos: Sequence[int] = (),
    ) -> None:  # fmt: skip
        config = forward.model.config
        assert watch is None or not policy.eviction.by_importance, "of what is evicted no confidence is known"
        if (watch is not None or policy.eviction.by_importance) and config.layers < 2:
            raise ModelError(f"{config.name} has {config.layers} layer, and FOCUS goes by the first two")
        if config.shifted and policy.family == "block-diffusion":
            check_whole_blocks(policy, config)
        super().__init__(policy, prompts, config.mask_token, eos)
        self._forward = forward
        self._cache = forward.cache
        self._draws = draws  # None: the weights decide
        self._listed = bool(numbers_of(policy)["listed"][0])
        # A long prompt's chunks end where blocks do: a block's positions see each other.
        self._longest = max(self._block, max_prefill_tokens // self._block * self._block)
        self._mask = config.mask_token
        self._shifted = config.shifted
        self._watch = watch
        self._masks_alone = policy.unmasking.head == "masks"
        assert watch is None or not self._masks_alone, "who watches is told of all rows"
        self._pieces = policy.batching.pieces
        self._whole = computes_whole_blocks(policy)
        edits = policy.unmasking if isinstance(policy.unmasking, EditingUnmasking) else None
        self._editing = (
            None if edits is None else JointThreshold(edits.threshold, edits.edit_threshold, edits.max_post_edit_steps)
        )
        self._without_masks: dict[int, int] = {}  # slot -> forwards of its block that met no mask
        self._prepared: tuple[StepPlan, _Made] | None = None  # the step that comes after the one in flight
        self._expected: tuple[StepPlan, _Made] | None = None  # the step in flight, as it was prepared

    def step(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan and say what committed; ModelError when the device is out of memory."""
        begin = time.perf_counter()
        self._expected, self._prepared = self._prepared, None
        for request in plan.freed:
            self._cache.release(self._slot_of.pop(request))
        try:
            outcome = self._prefill(plan) if plan.prefill else self._decode(plan)
        except torch.OutOfMemoryError as error:
            f = plan.features
            budget = "max_batched_tokens" if self._policy.family == "full-sequence" else "max_prefill_tokens"
            raise ModelError(
                f"the device is out of memory in a step of {f.tokens} tokens and {f.batch} sequences: set num_pages, "
                f"max_batch or {budget} lower ({str(error).splitlines()[0]})"
            ) from None
        return replace(outcome, latency=time.perf_counter() - begin, ends=self._ends(plan, outcome.committed))

    def prepare(self, plan: StepPlan) -> None:
        """Make the batch of a step to come while the device works on another; a decode step brings its own tokens.

        `step` takes it where the step turns out to be as it was decided on, and otherwise makes its own.
        """
        if self._prepared is not None or self._pieces or (plan.prefill and self._in_chunks(plan)):
            return
        need = -(-self._reach(plan) // self._cache.page_size)
        if self._cache.more_pages(plan.slots, need) > self._cache.num_free:
            return  # those of rows that are over come free with the step in flight
        made = self._make(plan)
        (self._forward.bring if plan.prefill else self._forward.lay_out)(made.batch)
        self._prepared = plan, made

    def _prepared_or_made(self, plan: StepPlan) -> _Made:
        if self._expected is None:
            return self._make(plan)
        decided, made = self._expected
        if decided.prefill != plan.prefill or not all(map(np.array_equal, self._facts(decided), self._facts(plan))):
            return self._make(plan)
        if not plan.prefill:  # what commits in the step before is among them
            at = made.batch.positions
            made.batch.tokens[:] = self._tokens[np.repeat(plan.slots, np.diff(made.batch.query_start)), at]
        return made

    def _facts(self, plan: StepPlan) -> list[npt.NDArray[Any]]:
        """All that a step's batch follows from but its tokens."""
        facts: list[npt.NDArray[Any]] = [plan.requests, plan.slots, plan.block_start, plan.end]
        if plan.prefill:
            return [*facts, plan.num_tokens, plan.num_keys, plan.window]
        window = self._window(plan)
        facts += [window, visible(plan.status, window, self._listed)]
        if self._whole and not self._masks_alone and self._watch is None and self._forward.sampling is None:
            return facts
        return [*facts, plan.phases, plan.status, plan.evaluations]

    def _make(self, plan: StepPlan) -> _Made:
        """The batch of a step, its pages reserved."""
        if not plan.prefill:
            return self._decode_batch(plan)
        ends = plan.num_keys.astype(np.int64)
        self._open(plan, ends)
        return self._prefill_batch(plan, ends - plan.num_tokens, ends, self._block if plan.window.any() else 0)

    def _in_chunks(self, plan: StepPlan) -> bool:
        """Whether a prefill is all of one prompt, and too long for one forward."""
        whole = len(plan.num_keys) == 1 and plan.num_tokens[0] == plan.num_keys[0]
        return bool(whole and plan.window.any() and plan.num_keys[0] > self._longest)

    def _reach(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        """Tokens of each row that have pages once a step is computed."""
        if plan.prefill:
            return plan.num_keys.astype(np.int64)
        # Keys behind the window are seen, too: those that a step out of the block has cached.
        window = self._window(plan)
        window = window | visible(plan.status, window, self._listed)
        reach: npt.NDArray[np.int64] = (
            plan.block_start.astype(np.int64) + window.shape[1] - np.argmax(window[:, ::-1], axis=1)
        )
        return reach

    def _window(self, plan: StepPlan) -> Bools:
        """The positions of a decode step that are computed, [rows, width]."""
        idle = plan.phases == Phase.IDLE
        if not idle.any():
            return plan.window
        # A finished sequence of a frozen batch is computed all the same, and changes nothing.
        window = plan.window.copy()
        window[idle, : self._block] = True
        return window

    def _prefill(self, plan: StepPlan) -> StepOutcome:
        if self._pieces:
            # Whole blocks of prompts, through the head as in the engine's own graph; nothing of them commits.
            ends = plan.num_keys.astype(np.int64)
            self._open(plan, ends)
            made = self._prefill_batch(plan, ends - plan.num_tokens, ends, int(plan.num_tokens.min()))
            return StepOutcome(0.0, np.zeros_like(plan.window), self._forward.run(made.batch).device)
        device = 0.0
        if self._in_chunks(plan):
            length = int(plan.num_keys[0])
            self._open(plan, np.array([length]))
            for begin in range(0, length, self._longest):
                end = min(begin + self._longest, length)
                last = self._block if end == length else 0
                made = self._prefill_batch(plan, np.array([begin]), np.array([end]), last)
                out = self._forward.run(made.batch)
                device += out.device
        else:
            made = self._prepared_or_made(plan)
            out = self._forward.run(made.batch)
            device = out.device
        if not plan.window.any():  # of a long prompt a part without its last block, which is a denoising step
            return StepOutcome(0.0, np.zeros_like(plan.window), device)
        return StepOutcome(0.0, self._commit(plan, made.rows, made.columns, out.tokens, out.confidence), device)

    def _open(self, plan: StepPlan, lengths: npt.NDArray[np.int64]) -> None:
        """Give new requests their prompts, and all of them pages."""
        canvas = -(-plan.end.astype(np.int64) // self._block) * self._block
        self._grow(int(plan.slots.max()) + 1, int(np.maximum(canvas, lengths).max()) + 1)
        for slot, request, prompt in zip(
            plan.slots.tolist(), plan.requests.tolist(), plan.prompt.tolist(), strict=True
        ):
            self._own(slot, request, prompt)
        self._cache.reserve(plan.slots, lengths)

    def _prefill_batch(
        self, plan: StepPlan, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], num_sampled: int
    ) -> _Made:
        """Positions begins[s] to ends[s] of each row; the last `num_sampled` of each are sampled."""
        n = len(ends)
        counts = ends - begins
        start = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(n), counts)
        positions = np.arange(start[-1]) - start[row] + begins[row]
        slots = plan.slots[row]
        sampled = (start[1:, None] - num_sampled + np.arange(num_sampled)).reshape(-1)
        batch = Batch(
            tokens=self._tokens[slots, positions].astype(np.int64),
            positions=positions,
            places=self._cache.places(slots, positions),
            query_start=start,
            page_table=self._cache.tables(plan.slots, ends),
            history=ends,
            listed=np.zeros((n, 1), np.bool_),
            block_length=self._block,
            sampled=sampled,
            prefill=True,
            keys=self._keys(plan.requests[row][sampled], positions[sampled], 0),
        )
        rows, columns = np.divmod(np.arange(len(sampled)), max(1, num_sampled))
        return _Made(batch, rows, columns)

    def _decode_batch(self, plan: StepPlan) -> _Made:
        window = self._window(plan)
        rows, columns = np.nonzero(window)
        start = plan.block_start.astype(np.int64)
        slots = plan.slots[rows]
        positions = start[rows] + columns
        reach = self._reach(plan)
        if self._pieces:  # a prompt shorter than a block has had no prefill
            self._open(plan, reach)
        self._cache.reserve(plan.slots, reach)
        counts = np.count_nonzero(window, axis=1)
        evict, drawn = self._evict(plan, rows, columns)
        sampled = np.arange(len(rows))
        if self._masks_alone:
            idle = plan.phases == Phase.IDLE
            sampled = np.flatnonzero((plan.status[rows, columns] == MASKED) & ~idle[rows])
        chosen = rows[sampled]
        evaluations = plan.evaluations[chosen, columns[sampled]]
        batch = Batch(
            tokens=self._tokens[slots, positions].astype(np.int64),
            positions=positions,
            places=self._cache.places(slots, positions),
            query_start=np.concatenate([[0], np.cumsum(counts)]),
            page_table=self._cache.tables(plan.slots, reach),
            history=start,
            listed=visible(plan.status, window, self._listed),
            block_length=self._block,
            sampled=sampled,
            evict=evict,
            own_head=self._masks_alone,
            whole=evict is None and self._whole,
            keys=self._keys(plan.requests[chosen], positions[sampled], 1 + evaluations.astype(np.int64)),
        )
        return _Made(batch, chosen, columns[sampled], drawn)

    def _decode(self, plan: StepPlan) -> StepOutcome:
        batch, rows, columns, drawn = self._prepared_or_made(plan)
        out = self._forward.run(batch)
        if plan.evicting is None:
            self._tell(batch.evict, rows, columns, out)
            return StepOutcome(0.0, self._commit(plan, rows, columns, out.tokens, out.confidence), out.device)
        assert out.rows is not None
        rows, columns = rows[out.rows], columns[out.rows]
        retained = np.zeros_like(plan.window)
        retained[rows, columns] = True
        committed = self._commit(plan, rows, columns, out.tokens, out.confidence, drawn)
        return StepOutcome(0.0, committed, out.device, retained)

    def _keys(
        self, requests: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], step: int | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64] | None:
        """The chance of tokens that are drawn, by request, position and step; all [rows]."""
        sampling = self._forward.sampling
        return None if sampling is None else key(sampling.seed, TOKEN, requests, positions, step)

    def _evict(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
    ) -> tuple[Evict | None, Bools | None]:
        """The forward's input for an eviction, and the commits where the twin's draws decide both."""
        evicting, forced, drawn = plan.evicting, None, None
        n = len(plan.requests)
        if evicting is None:
            if self._watch is None:
                return None, None
            # Nothing is evicted, and the importances are computed all the same.
            zeros = np.zeros(n, np.int32)
            evicting, forced = Evicting(Focus(), zeros, zeros, zeros - 1), np.ones(len(rows), np.bool_)
        elif isinstance(self._draws, CommitDraws):
            retained, drawn = self._draws.draw_evicting(plan)
            forced = retained[rows, columns]
        masked = np.flatnonzero(plan.status[rows, columns] == MASKED)
        width = plan.window.shape[1]
        num = np.bincount(rows[masked], minlength=n)
        return Evict(
            evicting.rule, masked, np.concatenate([[0], np.cumsum(num)]), rows * width + columns, evicting.num_decoded,
            evicting.num_steps, plan.block_start.astype(np.int64) + evicting.progress, forced,
        ), drawn  # fmt: skip

    def _tell(
        self, evict: Evict | None, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], out: Sampled
    ) -> None:
        """Show a step's masks to whoever watches."""
        if self._watch is not None and evict is not None and out.delta is not None:
            m = evict.masked
            self._watch(ImportanceDelta(rows[m], columns[m], out.delta.cpu().numpy(), out.confidence[m]))

    def _commit(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32], drawn: Bools | None = None,
    ) -> Bools:  # fmt: skip
        """Which of the sampled positions commit, by the weights or as `drawn`; their tokens are kept."""
        if self._policy.rows.commits == "tokens":
            # The row at a position says what comes after it.
            after = plan.block_start[rows].astype(np.int64) + 1
            inside = after < plan.end[rows]
            self._tokens[plan.slots[rows[inside]], after[inside]] = tokens[inside]
            return np.ones_like(plan.window)
        if self._shifted:
            tokens, confidence = self._shift(plan, rows, columns, tokens, confidence)
        if self._editing is not None:
            return self._edit(self._editing, plan, rows, columns, tokens, confidence)
        if drawn is not None:
            committed = drawn
        elif self._draws is not None:
            committed = self._draws.draw(plan)
        else:
            committed, tokens = self._choose(plan, rows, columns, tokens, confidence)
        kept = committed[rows, columns]
        rows, columns = rows[kept], columns[kept]
        self._tokens[plan.slots[rows], plan.block_start[rows].astype(np.int64) + columns] = tokens[kept]
        return committed

    def _choose(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32],
    ) -> tuple[Bools, npt.NDArray[np.int64]]:  # fmt: skip
        """The positions that the weights commit, and the sampled positions' tokens."""
        shape = plan.window.shape
        said, sure, sampled = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        said[rows, columns], sure[rows, columns], sampled[rows, columns] = tokens, confidence, True
        masked = sampled & plan.window & (plan.status == MASKED)
        known = None
        if self._shifted:  # the block before has said the first position of this one
            known = (np.arange(shape[1]) == 0) & (plan.block_start > 0)[:, None]
        committed, said = choose(
            self._policy.unmasking, said, sure, masked, self._block, self._mask, steps_of(plan, masked),
            scheduled=False, known=known, threshold=plan.threshold,
        )  # fmt: skip
        return committed, said[rows, columns]

    def _edit(
        self, rule: JointThreshold, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp],
        tokens: npt.NDArray[np.int64], confidence: npt.NDArray[np.float32],
    ) -> Bools:  # fmt: skip
        """Change what blocks hold; a block commits, all of it, in the forward that ends it."""
        shape = plan.window.shape
        said, sure = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        said[rows, columns], sure[rows, columns] = tokens, confidence
        at = plan.block_start.astype(np.int64)[:, None] + np.arange(shape[1])
        held = self._tokens[plan.slots[:, None], at].astype(np.int64)
        undecided = plan.window & (plan.status == MASKED)  # by the engine, which knows of whole blocks alone
        masked = undecided & (held == self._mask)
        step = steps_of(plan, undecided)
        slots = plan.slots.tolist()
        post = np.array([self._without_masks.get(slot, 0) if n else 0 for slot, n in zip(slots, step, strict=True)])
        edited = edit(rule, held, said, sure, masked, undecided, post)
        self._without_masks.update(zip(slots, (post + ~masked.any(axis=1)).tolist(), strict=True))
        computed = undecided.any(axis=1)
        self._tokens[plan.slots[computed, None], at[computed]] = edited.tokens[computed]
        if self._draws is not None:
            return self._draws.draw(plan)
        done = edited.done | (step + 1 >= rule.most(self._block))
        committed: Bools = done[:, None] & undecided
        return committed

    def _shift(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:  # fmt: skip
        """The token of each position of whole blocks, where a row predicts the position after its own (Fast-dLLM v2).

        The last row of a block without masks says the next block's first token, which is in its place from then on.
        """
        start = plan.block_start.astype(np.int64)
        ends = (columns == self._block - 1) & ~(plan.status == MASKED)[:, : self._block].any(axis=1)[rows]
        ends &= start[rows] + self._block < plan.end[rows]
        self._tokens[plan.slots[rows[ends]], start[rows[ends]] + self._block] = tokens[ends]
        begins = columns == 0
        before = np.maximum(np.arange(len(rows)) - ~begins, 0)
        known = self._tokens[plan.slots[rows], start[rows]]
        has_known = begins & (start[rows] > 0)
        return np.where(has_known, known, tokens[before]), confidence[before]


def steps_of(plan: StepPlan, masked: Bools) -> npt.NDArray[np.int64]:
    """The steps that each row's block has had: as many as the mask computed most often, [rows]."""
    steps: npt.NDArray[np.int64] = plan.evaluations.max(axis=1, where=masked, initial=0).astype(np.int64)
    return steps


def check_policy(policy: Policy) -> None:
    """PolicyError where a policy asks for what no executor of decoders does."""
    if not policy.granularity.on_a_grid:
        raise PolicyError(f"{policy.name}: denoises canvases, which no mask model does: expected a DiffusionGemma")
    if policy.batching.pieces and not isinstance(policy.batching, Rounds):
        kind = type(policy.batching).__name__
        raise PolicyError(
            f"{policy.name}: dsim live prefills a prompt apart from others' steps, and {kind} beside them"
        )
    if isinstance(policy.batching, Rounds) and policy.batching.mixed:
        raise PolicyError(f"{policy.name}: mixed is true, and dsim live prefills apart from decoding: expected false")
    if caches_prefixes(policy):
        raise PolicyError(f"{policy.name}: prefix_caching is true, and dsim live shares no pages: expected false")
    if policy.unmasking.strategy == "law" and not isinstance(policy.unmasking, EditingUnmasking):
        raise PolicyError(f"{policy.name}: strategy is law, which a twin draws by, and dsim live unmasks by confidence")


def check_whole_blocks(policy: Policy, config: ModelConfig) -> None:
    """PolicyError unless a policy computes whole blocks every step: a row may say what comes after it."""
    if not policy.granularity.whole_block or policy.eviction.evicts:
        raise PolicyError(
            f"{policy.name}: leaves positions out of its steps, and the rows of {config.name} ({config.architecture}) "
            "say the position after theirs: expected whole blocks, as lmdeploy-bd32"
        )
    if policy.unmasking.head == "masks":
        raise PolicyError(
            f"{policy.name}: head is masks, and the row before a mask says what {config.name} has there: expected all"
        )
    if policy.batching.pieces:
        raise PolicyError(
            f"{policy.name}: prefills a prompt in pieces, and a row of {config.name} says the position after its own, "
            "which is of the next piece: expected lmdeploy-bd32"
        )
