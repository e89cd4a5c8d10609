"""The executor: runs a plan on a decoder with a paged cache, and lets the weights, or a profile's draws, commit."""

import time

import numpy as np
import numpy.typing as npt
import torch

from ..engine.commits import CommitDraws
from ..engine.errors import ModelError
from ..engine.eviction import DelayedCache
from ..engine.policy import Policy
from ..engine.rows import MASKED, visible
from ..engine.step import Phase, StepOutcome, StepPlan
from ..engine.unmasking import unmask
from .forward import Batch, Forward
from .prompts import Prompts

Bools = npt.NDArray[np.bool_]


class ModelExecutor:
    """Runs plans. It keeps each sequence's tokens and pages by the engine's slot; the engine decides all else."""

    def __init__(
        self, forward: Forward, policy: Policy, prompts: Prompts, draws: CommitDraws | None, max_prefill_tokens: int
    ) -> None:
        self._forward = forward
        self._cache = forward.cache
        self._policy = policy
        self._prompts = prompts
        self._draws = draws  # None: the weights decide
        self._block = policy.block_length
        self._listed = isinstance(policy.eviction, DelayedCache) and policy.eviction.visible == "listed"
        # A long prompt's chunks end where blocks do: a block's positions see each other.
        self._longest = max(self._block, max_prefill_tokens // self._block * self._block)
        self._mask = forward.model.config.mask_token
        self._tokens: npt.NDArray[np.int32] = np.zeros((16, 64), np.int32)  # [slots, positions]
        self._slot_of: dict[int, int] = {}  # request -> slot whose pages it holds
        self._owner: dict[int, int] = {}  # slot -> request whose tokens it holds

    def step(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan and say what committed; ModelError when the device is out of memory."""
        begin = time.perf_counter()
        for request in plan.freed:
            self._cache.release(self._slot_of.pop(request))
        try:
            committed, device = self._prefill(plan) if plan.prefill else self._decode(plan)
        except torch.OutOfMemoryError as error:
            f = plan.features
            raise ModelError(
                f"the device is out of memory in a step of {f.tokens} tokens and {f.batch} sequences: set num_pages, "
                f"max_batch or max_prefill_tokens lower ({str(error).splitlines()[0]})"
            ) from None
        return StepOutcome(time.perf_counter() - begin, committed, device)

    def text(self, request: int, slot: int, length: int) -> npt.NDArray[np.int32]:
        """The tokens of a request that its slot still holds."""
        assert self._owner[slot] == request
        return self._tokens[slot, :length].copy()

    def _prefill(self, plan: StepPlan) -> tuple[Bools, float]:
        lengths = plan.num_tokens.astype(np.int64)
        self._open(plan, lengths)
        if len(lengths) == 1 and lengths[0] > self._longest:
            device = 0.0
            for begin in range(0, int(lengths[0]), self._longest):
                end = min(begin + self._longest, int(lengths[0]))
                last = end == lengths[0]
                rows, columns, tokens, confidence, took = self._run_prefill(
                    plan, np.array([begin]), np.array([end]), self._block if last else 0
                )
                device += took
        else:
            rows, columns, tokens, confidence, device = self._run_prefill(
                plan, np.zeros_like(lengths), lengths, self._block
            )
        return self._commit(plan, rows, columns, tokens, confidence), device

    def _open(self, plan: StepPlan, lengths: npt.NDArray[np.int64]) -> None:
        """Give new requests their prompts, and all of them pages."""
        canvas = -(-plan.end.astype(np.int64) // self._block) * self._block
        self._grow(int(plan.slots.max()) + 1, int(np.maximum(canvas, lengths).max()) + 1)
        for slot, request, prompt in zip(
            plan.slots.tolist(), plan.requests.tolist(), plan.prompt.tolist(), strict=True
        ):
            # A preempted request finds its tokens where they were.
            if self._owner.get(slot) != request:
                self._owner[slot] = request
                self._tokens[slot] = self._mask
                self._tokens[slot, :prompt] = self._prompts(request, prompt)
            self._slot_of[request] = slot
        self._cache.reserve(plan.slots, lengths)

    def _run_prefill(
        self, plan: StepPlan, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], num_sampled: int
    ) -> tuple[
        npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.int64], npt.NDArray[np.float32], float
    ]:  # fmt: skip
        """Compute positions begins[s] to ends[s] of each row; the last `num_sampled` of each are sampled."""
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
        )
        out = self._forward.run(batch)
        rows, columns = np.divmod(np.arange(len(sampled)), max(1, num_sampled))
        return rows, columns, out.tokens, out.confidence, out.device

    def _decode(self, plan: StepPlan) -> tuple[Bools, float]:
        window = plan.window
        idle = plan.phases == Phase.IDLE
        if idle.any():
            # A finished sequence of a frozen batch is computed all the same, and changes nothing.
            window = window.copy()
            window[idle, : self._block] = True
        rows, columns = np.nonzero(window)
        start = plan.block_start.astype(np.int64)
        slots = plan.slots[rows]
        positions = start[rows] + columns
        reach = start + window.shape[1] - np.argmax(window[:, ::-1], axis=1)
        self._cache.reserve(plan.slots, reach)
        counts = np.count_nonzero(window, axis=1)
        batch = Batch(
            tokens=self._tokens[slots, positions].astype(np.int64),
            positions=positions,
            places=self._cache.places(slots, positions),
            query_start=np.concatenate([[0], np.cumsum(counts)]),
            page_table=self._cache.tables(plan.slots, reach),
            history=start,
            listed=visible(plan.status, window, self._listed),
            block_length=self._block,
            sampled=np.arange(len(rows)),
        )
        out = self._forward.run(batch)
        return self._commit(plan, rows, columns, out.tokens, out.confidence), out.device

    def _commit(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32],
    ) -> Bools:  # fmt: skip
        """Which positions commit; their tokens are kept."""
        if self._policy.autoregressive:
            # The row at a position says what comes after it.
            after = plan.block_start[rows].astype(np.int64) + 1
            inside = after < plan.end[rows]
            self._tokens[plan.slots[rows[inside]], after[inside]] = tokens[inside]
            return np.ones_like(plan.window)
        if self._draws is not None:
            committed = self._draws.draw(plan)
        else:
            found = np.zeros(plan.window.shape, np.float32)
            found[rows, columns] = confidence
            masked = plan.window & (plan.status == MASKED)
            committed = unmask(self._policy.unmasking, found, masked, self._block)
        kept = committed[rows, columns]
        rows, columns = rows[kept], columns[kept]
        self._tokens[plan.slots[rows], plan.block_start[rows].astype(np.int64) + columns] = tokens[kept]
        return committed

    def _grow(self, slots: int, positions: int) -> None:
        have = self._tokens.shape
        if slots <= have[0] and positions <= have[1]:
            return
        tokens = np.full((max(slots, 2 * have[0]), max(positions, have[1])), self._mask, np.int32)
        tokens[: have[0], : have[1]] = self._tokens
        self._tokens = tokens
