"""Unmasking: which computed masks commit, by their likeliest token's confidence (block-diffusion.md 1.4)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .draw import draw_block, draw_by_law, draw_plan, draw_scheduled, draws_at_threshold, keep_commits
from .errors import PolicyError
from .hooks import draw_rows, draws_of_step
from .part import Answers, Choice, Part, Policy, Range
from .rows.blocks import HEADS
from .state import Draws, Masks

if TYPE_CHECKING:
    from .view import View

EOS = ("block", "ignored")
STRATEGIES = ("low_confidence_dynamic", "low_confidence_static", "entropy", "law")
# With these, full-sequence models commit a fixed number each step.
SCHEDULED = ("low_confidence_static", "entropy")


@dataclass(frozen=True)
class Unmasking(Part):
    """Which computed masks commit; always at least one.

    low_confidence_dynamic: confidences that reach the threshold (strict: exceed it), and the best. law: a whole block
    in its last step; the profile's law gives the number of steps. low_confidence_static: the n most confident.
    entropy: the lowest entropies, by Dream's schedule, possibly none; with cached keys a block's first step commits
    only its first position.

    n = max(1, block_length // denoising_steps), or 1. Full-sequence models commit one more in the first block_length %
    denoising_steps steps, so that the last step completes the block.
    """

    threshold: Annotated[float, Range(0, 1, above=True), "confidence at which a mask commits"] = 0.9
    temperature: Annotated[float | None, Range(0), "none: that of the profile's commit model, or 1"] = None
    strategy: Annotated[str, Choice(STRATEGIES), "which computed masks commit"] = "low_confidence_dynamic"
    denoising_steps: Annotated[int | None, Range(1), "steps of a block; none: one per token"] = None
    strict: Annotated[bool, "masks must exceed the threshold (SDAR's script, SGLang), not only reach it (LMDeploy)"] = (
        False
    )
    head: Annotated[
        str, Choice(HEADS), "computed rows that go through the LM head: all, as in engines, or masks only"
    ] = "all"
    eos: Annotated[str, Choice(EOS), "when an EOS ends a request: with its block, or not before its limit"] = "block"

    neutral = frozenset({"eos", "head"})
    # The engine's default: runs at it may use a profile's nearest yield, with a warning.
    own_threshold: ClassVar[float | None] = None

    @property
    def thresholds(self) -> tuple[float, ...]:
        """All thresholds that a step may have; the profile needs a yield at each."""
        return (self.threshold,)

    def threshold_now(self, view: "View") -> float:
        """The coming step's threshold; plain Python, each step."""
        raise NotImplementedError  # see `given`

    @property
    def given(self) -> bool:
        """Whether thresholds come from `threshold_now`."""
        return type(self).threshold_now is not Unmasking.threshold_now

    def unmask(
        self, surety: npt.NDArray[np.floating[Any]], sure: npt.NDArray[np.bool_], masked: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Which of the computed masks commit, all [rows, width]; plain Python, each step.

        surety: rises with confidence. sure: masks that reach the threshold.
        """
        raise NotImplementedError  # see `chooses`

    @property
    def chooses(self) -> bool:
        """Whether `unmask` replaces the strategy."""
        return type(self).unmask is not Unmasking.unmask

    @property
    def varies(self) -> bool:
        """Whether steps choose among thresholds, in Python or by a rule."""
        return len(self.thresholds) > 1

    def check(self, policy: Policy) -> None:
        whole = policy.eviction.by_importance or self.strategy == "law" or policy.batching.pieces
        if self.head == "masks" and (whole or policy.family != "block-diffusion"):
            raise PolicyError(f"{policy.name}: head is masks, expected all: this policy uses other rows' logits, too")
        uses = self.varies or self.given or self.chooses
        if uses and (policy.commits_by != "confidence" or self.strategy != "low_confidence_dynamic"):
            raise PolicyError(
                f"{policy.name}: {type(self).__name__} has thresholds or unmask, expected a policy that commits by "
                "low_confidence_dynamic"
            )
        if self.chooses and policy.eviction.by_importance:
            raise PolicyError(f"{policy.name}: {type(self).__name__} has unmask, expected no eviction by importance")
        if self.threshold not in self.thresholds:
            texts = ", ".join(f"{threshold:g}" for threshold in self.thresholds)
            raise PolicyError(f"{policy.name}: threshold is {self.threshold:g}, expected one of its thresholds {texts}")
        if self.strategy == "entropy" and not policy.cache.family:
            raise PolicyError(f"{policy.name}: strategy is entropy, Dream's schedule: expected a full-sequence policy")

    def answers(self, policy: Policy) -> Answers:
        """How the twin draws commits."""
        if draw_rows in policy.rows.rules:  # the rows have their own rule
            return {}
        if self.strategy == "law":
            return {draw_rows: draw_by_law}
        if self.scheduled(policy):
            return {draw_rows: draw_scheduled}
        answers: dict[Any, Any] = {draw_rows: draw_block}
        if self.chooses:
            answers[draw_rows] = keep_commits
        if self.varies:
            answers[draws_of_step] = draws_at_threshold
        return answers

    def most_steps(self, block_length: int) -> int | None:
        """A limit on a block's steps besides a law's, or None."""
        return self.denoising_steps

    def scheduled(self, policy: Policy) -> bool:
        """Whether a fixed number of masks commits each step."""
        return policy.cache.family is not None and self.strategy in SCHEDULED

    def quotas(self, policy: Policy) -> list[int]:
        """Masks that each step of a block commits, if scheduled."""
        block = policy.block_length
        cache: Any = policy.cache  # an ApproximateCache
        if self.strategy == "entropy":
            alone = cache.packs or (cache.in_place and not cache.keeps_outputs)
            return dreams_quotas(block, self.denoising_steps or block, alone)
        return linear_quotas(block, self.denoising_steps or block)


def linear_quotas(block_length: int, steps: int) -> list[int]:
    """LLaDA's schedule: equal numbers, the remainder first (1.1)."""
    least, extra = divmod(block_length, steps)
    return [least + 1] * extra + [least] * (min(steps, block_length) - extra)


def dreams_quotas(block_length: int, steps: int, first_alone: bool) -> list[int]:
    """Dream's schedule; the last step commits the rest. first_alone: the first commits one position."""
    remaining, quotas = block_length, []
    for step in range(steps):
        share = int(dreams_share(np.array([remaining]), np.array([step]), steps)[0])
        if first_alone and step == 0:
            share = 1
        quotas.append(share)
        remaining -= share
    quotas[-1] += remaining
    return quotas


def dreams_share(masks: npt.NDArray[np.int64], step: npt.NDArray[np.int64], steps: int) -> npt.NDArray[np.int64]:
    """Masks of a block that a step commits, [rows]: Dream's times run evenly from 1 to 0.001 (1.2).

    Rounded down, possibly to 0; callers commit the rest in the last step.
    """
    time = np.linspace(1.0, 1e-3, steps + 1)
    now = np.minimum(step, steps - 1)
    share: npt.NDArray[np.int64] = (masks * (1.0 - time[now + 1] / time[now])).astype(np.int64)
    return share


def unmask(
    rule: Unmasking,
    confidence: npt.NDArray[np.float32],
    masked: npt.NDArray[np.bool_],
    block_length: int,
    step: npt.NDArray[np.int64] | None = None,
    first_token: bool = False,
    threshold: float | None = None,
    *,
    forces: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.bool_]:
    """Which computed masks `masked` [rows, width] commit; of equal confidences the leftmost.

    step [rows]: earlier steps of each row's block, for LLaDA's schedule; None: n is constant. first_token: a block's
    first step commits its first token, then more up to n. threshold: None: the rule's. forces [rows]: at least the best
    commits; None: of every row.
    """
    if not masked.size:
        return masked.copy()
    score = np.where(masked, confidence, -np.inf)
    if first_token and step is not None:
        score[(step == 0) & masked[:, 0], 0] = np.inf
    steps = rule.denoising_steps or block_length
    num: int | npt.NDArray[np.int64] = max(1, block_length // steps)
    if step is not None:
        num = (num + (step < block_length % steps))[:, None]
    if rule.strategy == "low_confidence_static":
        order = np.argsort(-score, axis=1, kind="stable")
        rank = np.argsort(order, axis=1)
        best: npt.NDArray[np.bool_] = masked & (rank < num)
        return best
    # In the confidences' type: 0.9 as a float32 is not 0.9.
    bound = confidence.dtype.type(threshold or rule.threshold)
    chosen = masked & (confidence >= bound)
    if rule.strict:
        chosen &= confidence > bound
    if rule.chooses:
        return _chosen(rule, confidence, chosen, masked)
    rows = np.arange(len(masked)) if forces is None else np.flatnonzero(forces)
    chosen[rows, np.argmax(score[rows], axis=1)] = True
    certain: npt.NDArray[np.bool_] = chosen & masked
    return certain


def unmask_drawn(rule: Unmasking, masks: Masks, draws: Draws) -> npt.NDArray[np.bool_]:
    """The commits of `rule.unmask` in the twin: the odds of draws stand for confidences."""
    surety = np.full(masks.window.shape, -1.0)
    draw_plan(masks, draws, surety)
    return _chosen(rule, surety, surety > 1.0, surety >= 0.0)


def array_of(answer: Any, source: str, kind: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A policy's answer in plain Python; PolicyError names its `source` if type or shape are others."""
    try:
        array = np.asarray(answer)
    except ValueError:  # rows of unequal lengths
        array = np.array(None)
    if array.shape != shape or array.dtype.kind != np.dtype(kind).kind:
        words = {np.int64: "whole numbers", np.bool_: "bool"}[kind]
        raise PolicyError(f"{source} returned {array.dtype} {list(array.shape)}, expected {words} {list(shape)}")
    return array


def _chosen(rule: Unmasking, surety: Any, sure: Any, masked: Any) -> npt.NDArray[np.bool_]:
    source = f"{type(rule).__name__}.unmask"
    chosen = array_of(rule.unmask(surety, sure, masked.copy()), source, np.bool_, masked.shape)
    if (chosen & ~masked).any():
        row, column = np.argwhere(chosen & ~masked)[0].tolist()
        raise PolicyError(f"{source} returned position {column} of row {row}, which is no computed mask")
    return chosen
