"""The commit model: the chance that each computed mask commits, keyed.

A mask at distance d from the frontier (the sequence's first mask) passes if its draw u satisfies odds[d] * theta *
(1 - u) / u > 1, which has probability odds * theta / (1 + odds * theta). theta is a product of log-normal factors of
request, block and step, and one of how full the block is. The left-hand side acts as the confidence: if no mask passes,
the greatest commits (LMDeploy's low_confidence_dynamic).
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from .chance import BLOCK_FACTOR, COMMIT, IMPORTANCE, PADDING, REQUEST_FACTOR, STEP_FACTOR, key, uniform
from .draw import CELLS, CELLS_PER_STD, REQUEST_DRAW, accept_plan, draw_plan, law_plan, scheduled_plan
from .errors import ProfileError
from .plain import Positive, Range, Share, Signed
from .records import table
from .state import Draws
from .step import StepPlan
from .unmasking import Unmasking, linear_quotas, unmask_drawn

MOST_STEPS = 512  # steps of a block or canvas; a request that needs more is stuck
LogOdds = Annotated[float, Range(-100, 100)]


@dataclass(frozen=True)
class CommitModel:
    """How likely computed masks commit, for a workload, block size, threshold and temperature."""

    workload: str
    block_length: Positive
    threshold: Share  # confidence
    temperature: float | None  # None: the source does not say
    # [block_length] of a typical request, by distance from the frontier.
    pass_probability: tuple[Share, ...]
    request_spread: float = 0.0  # standard deviation of the log-odds between requests
    block_spread: float = 0.0  # ... between a request's blocks
    step_spread: float = 0.0  # ... between a block's steps
    stage_gain: LogOdds = 0.0  # from an empty to a full block
    padding_share: Share = 0.0  # of a request's blocks: the last ones, padding, commit whole
    source: str = ""
    extrapolated_from: Positive | None = None  # fitted block size, if it differs

    def for_block(self, block_length: int) -> "CommitModel":
        """The model at another block size, marked as extrapolated."""
        if block_length == self.block_length:
            return self
        probabilities = self.pass_probability
        tail = probabilities[-1] / probabilities[-2] if len(probabilities) > 1 and probabilities[-2] > 0 else 1.0
        table = list(probabilities[:block_length])
        while len(table) < block_length:
            table.append(table[-1] * tail)
        return replace(
            self, block_length=block_length, pass_probability=tuple(table), extrapolated_from=self.block_length
        )


@dataclass(frozen=True)
class ImportanceDeltas:
    """Importance deltas of decodable and other masks (focus.md 3.4).

    In standard deviations from the mean over a sequence's masks; means at the frontier, falling by `distance_slope` a
    position.
    """

    decodable_mean: Signed
    decodable_std: float
    undecodable_mean: Signed
    undecodable_std: float
    distance_slope: Signed = 0.0


def choose(
    models: tuple[CommitModel, ...],
    source: str,
    workload: str | None,
    block_length: int,
    threshold: float,
    temperature: float | None = None,
) -> CommitModel:
    """The profile's commit model for a run; ProfileError lists what it holds."""
    if not models:
        raise ProfileError(
            f"{source} holds no commit model (commits is empty): it runs policies that need none, such as `ar`"
        )
    chosen: dict[str, Any] = {"workload": workload or models[0].workload, "threshold": round(threshold, 9)}
    if temperature is not None:
        chosen["temperature"] = temperature
    for name, value in chosen.items():
        values = dict.fromkeys(getattr(m, name) for m in models)
        models = tuple(m for m in models if getattr(m, name) == value)
        if not models:
            listed = ", ".join(map(str, values))
            raise ProfileError(f"{source} holds commit models of {name} {listed}; this run asks for {value}")
    exact = [m for m in models if m.block_length == block_length]
    if exact:
        return exact[0]
    # The nearest fitted block size; of two, the larger.
    nearest = min(models, key=lambda m: (abs(m.block_length - block_length), -m.block_length))
    return nearest.for_block(block_length)


_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 1024) for i in range(1024)])


def _draws(num_requests: int, width: int, block: int) -> Draws:
    return Draws(
        requests=table(np.zeros(num_requests, REQUEST_DRAW)),
        streams=np.zeros(4, np.uint64),
        odds=np.zeros(width),
        stage=np.zeros(block + 1),
        factors=np.zeros((3, 1024)),
        deltas=np.zeros(5),
        schedule=np.zeros(2, np.int64),
        law=np.zeros(3),
        ahead=np.zeros(0),
    )


NO_DRAWS = _draws(0, 1, 1)


@dataclass(frozen=True)
class CanvasLaw:
    """Denoising forwards until a canvas commits whole, for a workload and canvas length (production-dllm-serving.md
    1.2, 1.3).

    round(median * request * canvas * drift ** index), within `least` and `most`; the factors are log-normal, `index`
    counts a request's canvases from 0. With a histogram: its forwards at the normal quantile of request + canvas +
    by_canvas[index], both normal; the squares of their spreads sum to 1 if canvases are to have its shares.
    """

    workload: str
    canvas_length: Positive
    median: Annotated[float, Range(1)]  # forwards of a typical request's first canvas
    request_spread: float = 0.0  # standard deviation of the logarithm between requests
    canvas_spread: float = 0.0  # ... between a request's canvases
    drift: Annotated[float, Range(0.01, 100)] = 1.0  # ratio of a canvas's forwards to the one before
    least: Positive = 2
    most: Annotated[int, Range(1, MOST_STEPS)] = 48
    source: str = ""
    engine: str = ""  # measured on; empty: none
    histogram: tuple[tuple[int, float], ...] = ()  # most forwards of each bucket, rising to `most`, and its share
    # In standard deviations, of a request's first canvas, second, ..., all later ones.
    by_canvas: tuple[Annotated[float, Range(-10, 10)], ...] = ()

    def of_length(self, canvas_length: int) -> "CanvasLaw":
        """The law for another canvas length: a pessimistic guess.

        Wider canvases take forwards in proportion to length, narrower ones the same number.
        """
        if canvas_length == self.canvas_length:
            return self
        times = min(max(1.0, canvas_length / self.canvas_length), MOST_STEPS / self.most)
        return replace(
            self,
            canvas_length=canvas_length,
            median=self.median * times,
            most=round(self.most * times),
            histogram=tuple((round(forwards * times), share) for forwards, share in self.histogram),
            source=f"{self.source}; of canvases of {self.canvas_length}, {times:g} times as many forwards",
        )

    def forwards(self) -> npt.NDArray[np.float64]:
        """[CELLS] A histogram's forwards by normal quantile (draw.py); equally likely within a bucket."""
        return _forwards(self.histogram, self.least)


@lru_cache(maxsize=64)
def _forwards(histogram: tuple[tuple[int, float], ...], least: int) -> npt.NDArray[np.float64]:
    highest, shares = np.array(histogram, np.float64).T
    cumulative = np.cumsum(shares) / shares.sum()
    fewest, before = np.append(least - 1, highest[:-1]), np.append(0.0, cumulative[:-1])
    normal = NormalDist()
    levels = np.array([normal.cdf((cell + 0.5) / CELLS_PER_STD - CELLS / CELLS_PER_STD / 2) for cell in range(CELLS)])
    bucket = np.searchsorted(cumulative, levels, side="right").clip(max=len(highest) - 1)
    within = (levels - before[bucket]) / (cumulative[bucket] - before[bucket])
    forwards: npt.NDArray[np.float64] = fewest[bucket] + np.ceil(within * (highest - fewest)[bucket]).clip(min=1)
    return forwards


class ScheduledCommits:
    """A fixed number of tokens a step: `quotas`, by default LLaDA's schedule.

    The leftmost masks commit; the choice does not change a full-sequence step's cost.
    """

    def __init__(
        self, block_length: int, denoising_steps: int | None, quotas: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        schedule = linear_quotas(block_length, denoising_steps or block_length) if quotas is None else quotas
        self.arrays = NO_DRAWS._replace(schedule=np.array(schedule, np.int64))

    def draw(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        committed: npt.NDArray[np.bool_] = scheduled_plan(plan.masks, self.arrays)
        return committed


class LawDraws:
    """Draws from a law of steps per block: all masks commit in the last step.

    cap: most steps of a block, [requests] or a number.
    """

    def __init__(self, law: CanvasLaw, seed: int, num_requests: int, cap: npt.ArrayLike | None = None) -> None:
        d = self.arrays = _draws(num_requests, 1, 1)
        pick = (key(seed, REQUEST_FACTOR, np.arange(num_requests)) >> np.uint64(54)).astype(np.intp)
        factor, canvas = law.request_spread * _QUANTILES[pick], law.canvas_spread * _QUANTILES
        d.requests["factor"] = factor if law.histogram else np.exp(factor)
        d.factors[0] = canvas if law.histogram else np.exp(canvas)
        d.streams[:] = [key(seed, purpose)[0] for purpose in (COMMIT, STEP_FACTOR, BLOCK_FACTOR, IMPORTANCE)]
        d.requests["most"] = law.most if cap is None else np.minimum(law.most, cap)
        d.law[:] = law.median, law.drift, law.least
        if law.histogram:
            self.arrays = d._replace(law=np.append(d.law, law.forwards()), stage=np.array(law.by_canvas or (0.0,)))

    def draw(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        committed: npt.NDArray[np.bool_] = law_plan(plan.masks, self.arrays)
        return committed


class TokenDraws:
    """Draws of accepted next tokens of an autoregressive model.

    acceptances [columns]: probability of the next token and of each draft, given the earlier ones.
    """

    def __init__(self, acceptances: Sequence[float], seed: int) -> None:
        streams = np.array([key(seed, COMMIT)[0], 0, 0, 0], np.uint64)
        self.arrays = NO_DRAWS._replace(odds=np.array(acceptances, np.float64), streams=streams)

    def draw(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        committed: npt.NDArray[np.bool_] = accept_plan(plan.masks, self.arrays)
        return committed


NO_MODELS: Mapping[float, CommitModel] = {}


class CommitDraws:
    """Draws from a commit model: which masks of a plan commit.

    Lengths are [requests]. on_a_grid: blocks begin at multiples of their length, else at the prompt's end. deltas: for
    eviction by importance. models: by threshold, if steps choose one. unmasking: the policy's, if it chooses. ahead:
    see Draws.
    """

    def __init__(
        self,
        model: CommitModel,
        seed: int,
        input_length: npt.NDArray[np.int64],
        output_length: npt.NDArray[np.int64],
        width: int,
        *,
        deltas: ImportanceDeltas | None = None,
        max_tokens: npt.NDArray[np.int64] | None = None,
        on_a_grid: bool = True,
        models: Mapping[float, CommitModel] = NO_MODELS,
        unmasking: Unmasking | None = None,
        ahead: tuple[float, ...] = (),
    ) -> None:
        index = np.arange(len(input_length))
        block = self.block_length = model.block_length
        d = self.arrays = _draws(len(index), width, block)._replace(ahead=np.array(ahead, np.float64))
        pick = (key(seed, REQUEST_FACTOR, index) >> np.uint64(54)).astype(np.intp)
        d.requests["factor"] = np.exp(model.request_spread * _QUANTILES)[pick]
        self._padding = model.padding_share, seed
        self._on_a_grid, self._unmasking = on_a_grid, unmasking
        self._levels: dict[float, CommitDraws] = {}  # by threshold; may include this one
        self.seat(index, input_length, output_length, max_tokens)
        d.streams[:] = [key(seed, purpose)[0] for purpose in (COMMIT, STEP_FACTOR, BLOCK_FACTOR, IMPORTANCE)]
        chance = np.array(model.for_block(width).pass_probability)
        with np.errstate(divide="ignore"):
            d.odds[:] = chance / (1.0 - chance)
        d.stage[:] = np.exp(model.stage_gain * np.arange(block + 1) / block)
        d.factors[:] = np.exp(model.block_spread * _QUANTILES), np.exp(model.step_spread * _QUANTILES), _QUANTILES
        self._evicts = deltas is not None
        if deltas is not None:
            d.deltas[:] = astuple(deltas)
        for threshold, other in models.items():
            self._levels[threshold] = self
            if other != model:
                self._levels[threshold] = CommitDraws(
                    other, seed, input_length, output_length, width, deltas=deltas, max_tokens=max_tokens,
                    on_a_grid=on_a_grid, unmasking=unmasking, ahead=ahead,
                )  # fmt: skip

    @property
    def of_run(self) -> Draws | tuple[Draws, ...]:
        """A run's arrays; one per threshold if steps choose one."""
        return tuple(draws.arrays for draws in self._levels.values()) or self.arrays

    def _others(self) -> "list[CommitDraws]":
        return [draws for draws in self._levels.values() if draws is not self]

    @property
    def num_padding(self) -> npt.NDArray[np.int32]:
        """Last blocks of padding, [requests]."""
        padding: npt.NDArray[np.int32] = self.arrays.requests["num_padding"]
        return padding

    def miss_eos(self, missed: npt.NDArray[np.bool_], limited: npt.NDArray[np.bool_]) -> None:
        """Make the block after these requests' EOS padding, too."""
        for draws in (self, *self._others()):
            draws.num_padding[missed] = np.where(limited, draws.num_padding + 1, 1)[missed]

    def seat(
        self,
        index: npt.NDArray[np.int64],
        input_length: npt.NDArray[np.int64],
        output_length: npt.NDArray[np.int64],
        max_tokens: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Set these requests' lengths, which a server learns as they arrive.

        With a limit (max_tokens) blocks after the answer's last are padding; without (0) the model's share of all.
        """
        share, seed = self._padding
        block, answer = self.block_length, np.maximum(output_length, 1)
        limit = np.maximum(answer, 0 if max_tokens is None else max_tokens)
        last = (input_length + limit - 1) // block
        blocks = last - input_length // block + 1
        padding = np.minimum(np.floor(share * blocks + uniform(key(seed, PADDING, index))), blocks)
        if max_tokens is not None:
            begin = input_length % block if self._on_a_grid else 0
            padding = np.where(max_tokens > 0, last - input_length // block - (begin + answer - 1) // block, padding)
        self.arrays.requests["last_block"][index] = last
        self.arrays.requests["num_padding"][index] = padding
        for other in self._others():
            other.seat(index, input_length, output_length, max_tokens)

    def draw(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """Masks that commit if all layers compute the window, [rows, width]."""
        return self.of_window(plan, plan.window)

    def draw_evicting(self, plan: StepPlan) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Retained positions, and masks among them that commit, both [rows, width].

        Deltas depend on whether a mask is decodable: would commit without eviction.
        """
        assert plan.evicting is not None
        assert self._evicts, "no importance deltas were given"
        retained = plan.evicting.rule.draw_retained(plan, self.arrays, self.draw(plan))
        return retained, self.of_window(plan, retained)

    def of_window(self, plan: StepPlan, window: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Masks that commit if `window` [rows, width] is computed."""
        draws = self if plan.threshold is None else self._levels.get(plan.threshold, self)
        masks, arrays = plan.masks._replace(window=window), draws.arrays
        if self._unmasking is not None:
            return unmask_drawn(self._unmasking, masks, arrays)
        committed: npt.NDArray[np.bool_] = draw_plan(masks, arrays, np.zeros((len(window), 0)))
        return committed


Commits = CommitDraws | LawDraws | ScheduledCommits | TokenDraws
