"""The executor of canvases: encodes and denoising passes; the checkpoint's rule ends a canvas.

They are two forwards: layers scale them differently.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..engine.commits import LawDraws
from ..engine.policies.canvas import Canvas as CanvasGranularity
from ..engine.spec import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from .canvas_forward import Canvas, CanvasCache, KeyedChance, Turn
from .canvas_model import CanvasConfig
from .executor import out_of_memory
from .forward import DeviceClock
from .prompts import Prompts
from .refused import refuse, shares_pages
from .texts import Bools, Texts

BLANK = 0  # fills positions without a token


def check_canvas(policy: Policy, config: CanvasConfig) -> None:
    """PolicyError unless the policy denoises canvases of the checkpoint's length."""
    if not isinstance(policy.granularity, CanvasGranularity):
        refuse(policy, {f"denoises no canvas as {config.name}: expected sglang-gemma or vllm-diffusion": True})
    length, trained = policy.block_length, config.canvas_length
    reason = f"canvas_length is {length}, and {config.name} was trained with {trained}: expected that"
    refuse(policy, {reason: length != trained} | shares_pages(policy))


class CanvasExecutor(Texts):
    """draws: a law that ends canvases; None: the checkpoint's rule. eos: see `Texts`."""

    def __init__(
        self,
        cache: CanvasCache,
        policy: Policy,
        prompts: Prompts,
        draws: LawDraws | None,
        seed: int,
        eos: Sequence[int] = (),
    ) -> None:
        check_canvas(policy, cache.model.config)
        super().__init__(policy, prompts, BLANK, eos)
        self._cache = cache
        self._draws = draws
        self._seed = seed
        rule, limit = cache.model.config.renoise, policy.unmasking.denoising_steps
        self._rule = rule if limit is None else replace(rule, max_steps=min(limit, rule.max_steps))
        self._denoised: dict[int, Canvas] = {}  # by slot
        self._device = cache.model.embedding.device

    def step(self, plan: StepPlan) -> StepOutcome:
        """Run a plan; ModelError when the device is out of memory."""
        begin = time.perf_counter()
        # Planning may have freed a row of this step: compute it, then free its pages.
        rows = {*plan.requests.tolist()}
        self._release([request for request in plan.freed if request not in rows])
        clock = DeviceClock(self._device)
        try:
            committed = self._compute(plan)
            clock.stop()
            device = clock.seconds()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(plan, error) from None
        self._release([request for request in plan.freed if request in rows])
        return StepOutcome(time.perf_counter() - begin, committed, device, ends=self._ends(plan, committed))

    def _release(self, requests: Sequence[int]) -> None:
        for request in requests:
            slot = self._slot_of.pop(request)
            self._cache.release(slot)
            self._denoised.pop(slot, None)  # a new canvas draws the same numbers

    def _compute(self, plan: StepPlan) -> Bools:
        self._grow(int(plan.slots.max()) + 1, int(max(plan.num_keys.max(), plan.end.max() + self._block)) + 1)
        texts: dict[int, torch.Tensor] = {}
        turns: dict[int, Turn] = {}
        idle: dict[int, Turn] = {}
        vocab = self._cache.model.config.vocab
        for i, slot in enumerate(plan.slots.tolist()):
            phase, keys = plan.phases[i], int(plan.num_keys[i])
            if phase == Phase.IDLE:  # computed, not used
                if slot in self._cache.length:
                    idle[slot] = Turn(1.0, np.zeros(self._block), np.zeros(self._block, np.int64))
                continue
            request, start = int(plan.requests[i]), int(plan.block_start[i])
            self._own(slot, request, int(plan.prompt[i]))
            if phase == Phase.DENOISE:
                if slot not in self._denoised:
                    chance = KeyedChance(self._seed, request, start, self._block)
                    self._denoised[slot] = Canvas(chance)
                    self._cache.begin(slot, chance.noise(vocab))
                turns[slot] = self._denoised[slot].turn(vocab, self._rule)
                continue
            self._denoised.pop(slot, None)
            tokens = self._tokens[slot, keys - int(plan.num_tokens[i]) : keys]
            texts[slot] = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        if texts:
            self._cache.encode(texts)
        if turns or idle:
            readings = self._cache.denoise(turns | idle)
            for slot in turns:
                self._denoised[slot].settle(readings[slot], self._rule)
        return self._commit(plan)

    def _commit(self, plan: StepPlan) -> Bools:
        """Which canvases are done, as whole rows; stores their tokens."""
        if self._draws is not None:
            committed = self._draws.draw(plan)
        else:
            done = [
                plan.phases[i] == Phase.DENOISE and self._denoised[slot].done
                for i, slot in enumerate(plan.slots.tolist())
            ]
            committed = np.array(done)[:, None] & plan.window & (plan.status == MASKED)
        for i in np.flatnonzero(committed.any(axis=1)).tolist():
            slot, start = int(plan.slots[i]), int(plan.block_start[i])
            answer = self._denoised.pop(slot).answer
            self._tokens[slot, start : start + self._block] = answer
        return committed
