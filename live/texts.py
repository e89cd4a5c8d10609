"""Requests' tokens by the engine's slot, and their ends at an EOS."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engine.spec import Policy
from ..engine.step import Phase, StepPlan, reached
from .prompts import Prompts

Bools = npt.NDArray[np.bool_]


class Texts:
    """unknown: fills positions without a token. eos: end a request once all tokens before are known.

    An EOS in a block with part of the prompt is missed, as in LMDeploy and the twin (block-diffusion.md 1.6).
    """

    def __init__(self, policy: Policy, prompts: Prompts, unknown: int, eos: Sequence[int] = ()) -> None:
        self._policy = policy
        self._prompts = prompts
        self._block = policy.block_length
        self._unknown = unknown
        self._eos = np.array(eos, np.int32)
        self._tokens: npt.NDArray[np.int32] = np.zeros((16, 64), np.int32)  # [slots, positions]
        self._slot_of: dict[int, int] = {}  # request -> slot of its pages
        self._owner: dict[int, int] = {}  # slot -> request of its tokens

    def text(self, request: int, slot: int, length: int) -> npt.NDArray[np.int32]:
        """A request's tokens, if its slot still holds them."""
        assert self._owner[slot] == request
        return self._tokens[slot, :length].copy()

    def _own(self, slot: int, request: int, prompt: int) -> None:
        """Give a slot to a request; a preempted one finds its tokens."""
        if self._owner.get(slot) != request:
            self._owner[slot] = request
            self._tokens[slot] = self._unknown
            self._tokens[slot, :prompt] = self._prompts(request, prompt)
        self._slot_of[request] = slot

    def _ends(self, plan: StepPlan, committed: Bools) -> npt.NDArray[np.int32] | None:
        """Each row's end: after its first EOS, once all before it is known."""
        if not len(self._eos):
            return None
        ends = plan.end.copy()
        known_end = np.minimum(reached(self._policy, plan, committed), plan.end)
        missed = 0 if self._policy.rows.commits == "tokens" else self._block  # skips a block with part of the prompt
        for i in np.flatnonzero(plan.phases != Phase.IDLE).tolist():
            slot, start, prompt = int(plan.slots[i]), int(plan.block_start[i]), int(plan.prompt[i])
            begin = start if start >= prompt else max(start + missed, prompt)
            matches = np.flatnonzero(np.isin(self._tokens[slot, begin : known_end[i]], self._eos))
            if len(matches):
                ends[i] = begin + int(matches[0]) + 1
        return ends

    def _grow(self, slots: int, positions: int) -> None:
        have = self._tokens.shape
        if slots <= have[0] and positions <= have[1]:
            return
        tokens = np.full((max(slots, 2 * have[0]), max(positions, have[1])), self._unknown, np.int32)
        tokens[: have[0], : have[1]] = self._tokens
        self._tokens = tokens
