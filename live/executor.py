"""The executor: plans on a decoder with a paged cache; weights, or a profile's draws, decide commits."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..engine.commits import CommitDraws
from ..engine.errors import ModelError
from ..engine.part import numbers_of
from ..engine.policies.multi_block import Buffer
from ..engine.rows.blocks import visible
from ..engine.spec import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from .choice import choose
from .evicting import Evict
from .forward import Batch, Forward
from .prompts import Prompts
from .texts import Bools, Texts

Index = npt.NDArray[np.intp]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class _Prepared(NamedTuple):
    """A step's batch; each sampled row's plan row and column; drawn commits."""

    batch: Batch
    rows: Index
    columns: Index
    drawn: Bools | None = None


class _Answers(NamedTuple):
    """Sampled rows: plan row, column, token, confidence."""

    rows: Index
    columns: Index
    tokens: Ints
    confidence: Floats

    def spread(self, shape: tuple[int, ...]) -> tuple[Ints, Floats, Bools]:
        """Tokens, confidences and marks of sampled positions, by row and column."""
        tokens, confidence, sampled = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        cells = self.rows, self.columns
        tokens[cells], confidence[cells], sampled[cells] = self.tokens, self.confidence, True
        return tokens, confidence, sampled


class ModelExecutor(Texts):
    """Runs plans; keeps tokens and pages by the engine's slot.

    watch: receives each decode step's importance, if nothing is evicted. eos: see `Texts`.
    """

    def __init__(
        self,
        forward: Forward,
        policy: Policy,
        prompts: Prompts,
        draws: CommitDraws | None,
        max_prefill_tokens: int,
        eos: Sequence[int] = (),
    ) -> None:
        config = forward.model.config
        if policy.eviction.by_importance and config.layers < 2:
            raise ModelError(f"{config.name} has {config.layers} layer, and FOCUS goes by the first two")
        super().__init__(policy, prompts, config.mask_token, eos)
        self._forward = forward
        self._cache = forward.cache
        self._draws = draws  # None: the weights decide
        self._listed = bool(numbers_of(policy)["listed"][0])
        # Chunks end with blocks: a block's positions see each other.
        self._longest = max(self._block, max_prefill_tokens // self._block * self._block)
        self._mask = config.mask_token
        self._shifted = config.shifted
        self._masks_alone = policy.unmasking.head == "masks"
        self._pieces = policy.batching.pieces

    def step(self, plan: StepPlan) -> StepOutcome:
        """Run a plan; ModelError when the device is out of memory."""
        begin = time.perf_counter()
        for request in plan.freed:
            self._cache.release(self._slot_of.pop(request))
        try:
            outcome = self._prefill(plan) if plan.prefill else self._decode(plan)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(plan, error) from None
        return replace(outcome, latency=time.perf_counter() - begin, ends=self._ends(plan, outcome.committed))

    def _reach(self, plan: StepPlan) -> Ints:
        """Tokens of each row of a decode step with pages after it."""
        # Cached keys after the window are seen, too.
        window = self._window(plan)
        window = window | visible(plan.status, window, self._listed)
        reach: Ints = plan.block_start.astype(np.int64) + window.shape[1] - np.argmax(window[:, ::-1], axis=1)
        return reach

    def _window(self, plan: StepPlan) -> Bools:
        """A decode step's computed positions, [rows, width]."""
        idle = plan.phases == Phase.IDLE
        if not idle.any():
            return plan.window
        # A frozen batch computes finished sequences, too.
        window = plan.window.copy()
        window[idle, : self._block] = True
        return window

    def _prefill(self, plan: StepPlan) -> StepOutcome:
        ends = plan.num_keys.astype(np.int64)
        self._open(plan, ends)
        num_sampled = self._block if plan.window.any() else 0
        if self._pieces:  # an engine's graph sends whole blocks through the head; none commits
            num_sampled = int(plan.num_tokens.min())
        parts = [(ends - plan.num_tokens, ends)]
        single = len(ends) == 1 and plan.num_tokens[0] == ends[0]
        if single and not self._pieces and num_sampled and ends[0] > self._longest:  # a prompt too long for a forward
            parts = list(pairwise(np.append(np.arange(0, ends[0], self._longest), ends)[:, None]))
        device = 0.0
        for begins, stops in parts:
            last = num_sampled if stops[0] == ends[0] else 0
            prepared = self._prefill_batch(plan, begins, stops, last)
            out = self._forward.run(prepared.batch)
            device += out.device
        if self._pieces or not plan.window.any():  # part of a prompt: nothing to denoise
            return StepOutcome(0.0, np.zeros_like(plan.window), device)
        answers = _Answers(prepared.rows, prepared.columns, out.tokens, out.confidence)
        return StepOutcome(0.0, self._commit(plan, answers), device)

    def _open(self, plan: StepPlan, lengths: Ints) -> None:
        """Give requests their prompts and pages."""
        canvas = -(-plan.end.astype(np.int64) // self._block) * self._block
        self._grow(int(plan.slots.max()) + 1, int(np.maximum(canvas, lengths).max()) + self._policy.width)
        for slot, request, prompt in zip(
            plan.slots.tolist(), plan.requests.tolist(), plan.prompt.tolist(), strict=True
        ):
            self._own(slot, request, prompt)
        self._cache.reserve(plan.slots, lengths)

    def _prefill_batch(self, plan: StepPlan, begins: Ints, ends: Ints, num_sampled: int) -> _Prepared:
        """Positions begins[s] to ends[s] of row s, the last `num_sampled` sampled."""
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
        )
        rows, columns = np.divmod(np.arange(len(sampled)), max(1, num_sampled))
        return _Prepared(batch, rows, columns)

    def _decode_batch(self, plan: StepPlan) -> _Prepared:
        window = self._window(plan)
        computed = window | self._policy.granularity.static
        rows, columns = np.nonzero(computed)
        real = window[rows, columns]  # others write nothing, are seen by none and never commit
        start = plan.block_start.astype(np.int64)
        slots = plan.slots[rows]
        positions = start[rows] + columns
        reach = self._reach(plan)
        if self._pieces:  # prompts shorter than a block have no prefill
            self._open(plan, reach)
        self._cache.reserve(plan.slots, reach)
        places = np.full(len(rows), -1)
        places[real] = self._cache.places(slots[real], positions[real])
        counts = np.count_nonzero(computed, axis=1)
        evict, drawn = self._evict(plan, rows, columns)
        sampled = np.arange(len(rows))
        if self._masks_alone:
            idle = plan.phases == Phase.IDLE
            sampled = np.flatnonzero((plan.status[rows, columns] == MASKED) & real & ~idle[rows])
        batch = Batch(
            tokens=self._tokens[slots, positions].astype(np.int64),
            positions=positions,
            places=places,
            query_start=np.concatenate([[0], np.cumsum(counts)]),
            page_table=self._cache.tables(plan.slots, reach),
            history=start,
            listed=visible(plan.status, window, self._listed),
            block_length=self._block,
            sampled=sampled,
            evict=evict,
        )
        return _Prepared(batch, rows[sampled], columns[sampled], drawn)

    def _decode(self, plan: StepPlan) -> StepOutcome:
        batch, rows, columns, drawn = self._decode_batch(plan)
        out = self._forward.run(batch)
        if plan.evicting is None:
            answers = _Answers(rows, columns, out.tokens, out.confidence)
            return StepOutcome(0.0, self._commit(plan, answers), out.device)
        assert out.rows is not None
        rows, columns = rows[out.rows], columns[out.rows]
        retained = np.zeros_like(plan.window)
        retained[rows, columns] = True
        committed = self._commit(plan, _Answers(rows, columns, out.tokens, out.confidence), drawn)
        return StepOutcome(0.0, committed, out.device, retained)

    def _evict(self, plan: StepPlan, rows: Index, columns: Index) -> tuple[Evict | None, Bools | None]:
        """An eviction's input, and commits if the twin draws both."""
        evicting, forced, drawn = plan.evicting, None, None
        n = len(plan.requests)
        if evicting is None:
            return None, None
        if self._draws is not None:
            retained, drawn = self._draws.draw_evicting(plan)
            forced = retained[rows, columns]
        rule, window = evicting.rule, self._window(plan)
        masked = np.flatnonzero(plan.status[rows, columns] == MASKED)
        num = np.bincount(rows[masked], minlength=n)

        def retain(growth: Floats) -> Bools:
            delta = np.zeros(window.shape, np.float32)
            delta[rows[masked], columns[masked]] = growth
            retained: Bools = rule.retained(evicting, plan.status, window, delta)[rows, columns]
            return retained if forced is None else forced

        return Evict(rule, masked, np.concatenate([[0], np.cumsum(num)]), retain), drawn

    def _commit(self, plan: StepPlan, answers: _Answers, drawn: Bools | None = None) -> Bools:
        """Which sampled positions commit, by the weights or `drawn`; stores their tokens."""
        if self._policy.rows.commits == "tokens":
            # A row predicts the next position.
            rows, after = answers.rows, plan.block_start[answers.rows].astype(np.int64) + 1
            inside = after < plan.end[rows]
            self._tokens[plan.slots[rows[inside]], after[inside]] = answers.tokens[inside]
            return np.ones_like(plan.window)
        if drawn is not None:
            committed = drawn
        elif self._draws is not None:
            committed = self._draws.draw(plan)
        else:
            committed, answers = self._choose(plan, answers)
        rows, columns = answers.rows, answers.columns
        chosen = committed[rows, columns]
        rows, columns = rows[chosen], columns[chosen]
        self._tokens[plan.slots[rows], plan.block_start[rows].astype(np.int64) + columns] = answers.tokens[chosen]
        return committed

    def _choose(self, plan: StepPlan, answers: _Answers) -> tuple[Bools, _Answers]:
        """What the weights commit, and the sampled tokens."""
        shape, forces = plan.window.shape, None
        tokens, confidence, sampled = answers.spread(shape)
        masked = sampled & plan.window & (plan.status == MASKED)
        evaluations = plan.evaluations
        if isinstance(self._policy.granularity, Buffer):  # blocks commit apart, each as a row
            apart = -1, self._block
            tokens, confidence, masked = tokens.reshape(apart), confidence.reshape(apart), masked.reshape(apart)
            evaluations = evaluations.reshape(apart)
            forces = self._policy.granularity.forces(plan.status).reshape(-1)
        committed, tokens = choose(
            self._policy,
            tokens,
            confidence,
            masked,
            steps_of(evaluations, masked),
            mask_token=self._mask,
            threshold=plan.threshold,
            forces=forces,
        )
        committed, tokens = committed.reshape(shape), tokens.reshape(shape)
        return committed, answers._replace(tokens=tokens[answers.rows, answers.columns])


def out_of_memory(plan: StepPlan, error: torch.OutOfMemoryError) -> ModelError:
    step = f"a step of {plan.features.tokens} tokens and {plan.features.batch} sequences"
    return ModelError(
        f"the device is out of memory in {step}: set num_pages, max_batch or the tokens of a step lower "
        f"({str(error).splitlines()[0]})"
    )


def steps_of(evaluations: npt.NDArray[np.uint16], masked: Bools) -> Ints:
    """Earlier steps of each row's block, by its most computed mask, [rows]."""
    steps: Ints = evaluations.max(axis=1, where=masked, initial=0).astype(np.int64)
    return steps
