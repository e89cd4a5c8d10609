"""Compare runs of the same requests, policy by policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..engine.errors import DsimError, cut, quoted
from ..files.place import FolderKind
from ..profiler.placed import placed
from ..profiler.profile import Profile
from ..report.page import Page
from ..report.result import Result, frame_of
from ..report.table import value
from ..results.metrics import METRICS, STATS, path
from ..results.run import Run
from .bounds import DISTRIBUTIONS, PER_REQUEST, Bound, Judged
from .deviation import Errors, errors, relative_error
from .error_parts import Parts, parts
from .pairs import Pair, PolicyRuns, Side, check_pair
from .steps import Journal, Steps, compare_steps

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str, int, int], None]  # policy, steps re-run, approximate total
Profiles = Callable[[str], Profile]  # by the name in a run

# Of a whole run; of batch and chunk the mean.
TOTALS = {
    name: path(name, *metric.stats[:1])
    for name, metric in METRICS.items()
    if metric.group in ("Requests", "Steps") and metric.unit != "ms"
}
FILES = ("compare.json", "report.html")


@dataclass(frozen=True)
class MetricErrors:
    """A latency metric of both runs in its unit, and its error."""

    unit: str
    predicted: Mapping[str, float | None]  # by statistic, over that run's completed requests
    measured: Mapping[str, float | None]
    error: Mapping[str, float | None]
    requests: Errors | None = None  # None: commits are not paired


@dataclass(frozen=True)
class Total:
    unit: str
    predicted: float
    measured: float
    error: float | None


@dataclass(frozen=True)
class PolicyErrors:
    pair: int  # index
    policy: str
    unpaired: str  # why not; empty: they are
    num_both: int  # completed in both
    left_out: Mapping[str, int]  # requests, by reason
    metrics: Mapping[str, MetricErrors]
    totals: Mapping[str, Total]
    steps: Steps | None  # None: a run has no step journal
    parts: Parts | None
    no_parts: str  # why there are none

    @property
    def name(self) -> str:
        """Names the pair unless it is the first."""
        return self.policy if self.pair == 0 else f"{self.policy} (pair {self.pair + 1})"

    def judge(self, bound: Bound) -> Judged:
        """DsimError if the bound is on unpaired requests."""
        metric = self.metrics[bound.metric]
        if bound.stat is None and metric.requests is None:
            raise DsimError(
                f"bound {quoted(bound.text)}: the requests of {self.name} are not paired, since {self.unpaired}: "
                f"expected a statistic, such as mean:{cut(bound.text)}"
            )
        error = metric.error.get(bound.stat or "")
        if bound.stat is None and metric.requests is not None:
            error = metric.requests.mape
        met = error is not None and abs(error) <= bound.limit
        return Judged(bound=bound.text, cell=self.name, value=error and abs(error), limit=bound.limit, met=met)


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Predicted against measured runs."""

    schema: ClassVar[str] = "dsim-compare"

    pairs: tuple[Pair, ...]
    cells: tuple[PolicyErrors, ...]
    overall: Mapping[str, Errors]  # by metric, over all paired cells' requests
    bounds: tuple[Judged, ...]
    notes: tuple[str, ...]

    def page(self) -> Page:
        from .comparison_page import comparison_page

        return comparison_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per policy and metric: both runs' statistics in the metric's unit, and relative errors."""
        rows = []
        for cell in self.to_json()["cells"]:
            rows += [{"policy": cell["policy"], "metric": name, **metric} for name, metric in cell["metrics"].items()]
        return frame_of(rows)

    @property
    def missed(self) -> list[str]:
        """A line for each missed bound."""
        return [str(judged) for judged in self.bounds if not judged.met]


COMPARISON = FolderKind("a comparison", FILES, FILES[0], Comparison.schema)


def compare_runs(
    pairs: Sequence[tuple[Run, Run]],
    profiles: Profiles,
    bounds: Sequence[Bound] = (),
    *,
    progress: Progress = lambda policy, done, total: None,
) -> Comparison:
    """Compare (predicted, measured) pairs; DsimError if a pair's requests differ.

    profiles: to re-run each policy and decompose its error.
    """
    cells: list[PolicyErrors] = []
    notes: list[str] = []
    paired: list[PolicyRuns] = []
    for i, (predicted, measured) in enumerate(pairs):
        check_pair(predicted, measured)
        names = dict.fromkeys((*predicted.policies, *measured.policies))
        shared = [name for name in names if name in predicted.policies and name in measured.policies]
        if len(shared) < len(names):
            missing = ", ".join(name for name in names if name not in shared)
            notes.append(f"pair {i + 1}: only one of its runs holds {missing}: left out")
        for policy in shared:
            runs = PolicyRuns(policy, predicted, measured)
            notes += runs.differences
            cells.append(_cell(i, runs, profiles, progress))
            if not runs.unpaired:
                paired.append(runs)
    overall = {}
    for name in PER_REQUEST * bool(paired):
        overall[name] = errors(*(np.concatenate([runs.values[name][side] for runs in paired]) for side in (0, 1)))
    return Comparison(
        pairs=tuple(Pair.of(*pair) for pair in pairs),
        cells=tuple(cells),
        overall=overall,
        bounds=tuple(cell.judge(bound) for bound in bounds for cell in cells),
        notes=tuple(notes),
    )


def _cell(pair: int, runs: PolicyRuns, profiles: Profiles, progress: Progress) -> PolicyErrors:
    policy, (predicted, measured), unpaired = runs.policy, runs.both, runs.unpaired
    summaries = [run.info.summary(policy) for run in runs.both]
    metrics = {}
    for name in DISTRIBUTIONS:
        p, m = ({stat: value(summary, path(name, stat)) for stat in STATS} for summary in summaries)
        metric = MetricErrors(METRICS[name].unit, p, m, {stat: relative_error(p[stat], m[stat]) for stat in STATS})
        if name in runs.values and not unpaired:
            metric = replace(metric, requests=errors(*runs.values[name]))
        metrics[name] = metric
    totals = {}
    for name, keys in TOTALS.items():
        x, y = (value(summary, keys) for summary in summaries)
        if x is not None and y is not None:
            totals[name] = Total(METRICS[name].unit, x, y, relative_error(x, y))
    latency, divided, no_parts = None, None, runs.no_parts
    if not no_parts:
        placed_on = placed(policy)[1]
        try:
            p_profile = profiles(placed_on or Side.of(predicted).profile)
            # Where weights decide commits the measured run has none.
            m_profile = profiles(placed_on or Side.of(measured).profile or p_profile.name)
            on_step = partial(progress, policy)
            divided = parts(predicted, measured, policy, p_profile, m_profile, runs.index, on_step)
            latency = p_profile.latency
        except DsimError as error:
            no_parts = str(error)
    steps = None
    if runs.has_steps(predicted) and runs.has_steps(measured):
        journals = Journal.of(predicted, policy), Journal.of(measured, policy)
        steps = compare_steps(*journals, predicted.policy(policy), latency)
    left_out = runs.left_out
    return PolicyErrors(
        pair=pair,
        policy=policy,
        unpaired=unpaired,
        num_both=len(runs.index) - left_out["not completed in both"],
        left_out=left_out,
        metrics=metrics,
        totals=totals,
        steps=steps,
        parts=divided,
        no_parts=no_parts,
    )
