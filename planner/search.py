"""An Optuna study that proposes settings. After an interrupt it runs again on the stored replays."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ..engine import chance
from .fleet_space import FleetSpace
from .objective import HIGHER, INFEASIBLE, OBJECTIVES, Measure, Part, ReplayOutcome, Tried
from .quality import Quality
from .settings import NEAR, UNTESTED
from .space import Choice, Dimension, Space

EXPLORE, EXHAUSTED = 3, 100  # batches without a new setting: then random proposals, then the end
FAR = 100  # fields by which another policy counts
SAMPLER = 234  # purpose of draws

Progress = Callable[[str, int, int, str], None]  # phase, done, total, best setting
Judge = Callable[[Tried], Quality]
Refuse = Callable[[Tried], str]  # why not to replay; empty: replay


class Search:
    """A study and the settings that it has seen."""

    def __init__(
        self,
        objectives: tuple[str, ...],
        space: Space | FleetSpace,
        default: Tried,
        measure: Measure,
        *,
        jobs: int,
        seed: int,
        replicas: int,
        progress: Progress,
    ) -> None:
        self.objectives = objectives
        self.space: Any = space  # its candidates are of one type
        self.default = default
        self.measure = measure
        self.progress = progress
        self.signs = tuple(1.0 if name in HIGHER else -1.0 for name in objectives)
        self.seen: dict[Tried, ReplayOutcome] = {}
        self._jobs, self._seed, self._replicas = jobs, seed, replicas
        self._pruned: set[Tried] = set()
        directions = [StudyDirection.MAXIMIZE if sign > 0 else StudyDirection.MINIMIZE for sign in self.signs]
        pruner = optuna.pruners.MedianPruner(n_startup_trials=8)
        self.study = optuna.create_study(directions=directions, pruner=pruner)
        for preset in space.dimensions:
            start = default if default.preset == preset else self.space.candidate(preset, {}, default.replicas)
            self.study.enqueue_trial(self._params(start))

    def run(self, trials: int, refuse: Refuse, prune: float | None) -> None:
        """Try `trials` settings, or all of a smaller space."""
        idle = 0  # batches in a row without a new setting
        while (done := len(self._counted())) < trials and idle < EXHAUSTED:
            self.progress("searching", done, trials, self.best_text())
            self.study.sampler = self._sampler(len(self._finished()), idle)
            asked: list[tuple[optuna.Trial, Tried]] = []
            for _ in range(min(self._jobs, trials - done)):
                trial = self.study.ask()
                asked.append((trial, self._suggest(trial)))
            self._try(asked, refuse, prune)
            idle = 0 if len(self._counted()) > done else idle + 1
        self.progress("searching", trials, trials, self.best_text())

    def ranked(self) -> list[tuple[Tried, ReplayOutcome]]:
        """Settings replayed whole, by the first objective, then latency, then trial."""
        tried = dict.fromkeys(self._candidate_of(t) for t in self._counted() if t.state == TrialState.COMPLETE)
        return sorted(((c, self.seen[c]) for c in tried), key=lambda item: self.order(item[1]))

    def order(self, outcome: ReplayOutcome) -> tuple[float, float]:
        """Sorts outcomes, best first."""
        return -self.signs[0] * outcome.values[0], outcome.latency

    def worth(self, candidate: Tried, outcome: ReplayOutcome) -> float:
        """By the first objective, more is better; beyond the engine's tested range a tenth less."""
        value = self.signs[0] * outcome.values[0]
        return value - (UNTESTED - 1) * abs(value) if candidate.untested else value

    def equals(self, best: Tried, others: Sequence[Tried]) -> list[Tried]:
        """The settings that are as good in the search, within NEAR."""
        least = self.worth(best, self.seen[best])
        least -= (NEAR - 1) * abs(least)
        return [c for c in others if self.worth(c, self.seen[c]) >= least]

    def changes(self, candidate: Tried) -> int:
        """How many fields differ from the engine's default, or from the fleet as given; another policy is farther."""
        plain = self.space.candidate(candidate.preset, {}, candidate.replicas).columns
        return len(candidate.columns.items() - plain.items()) + FAR * (candidate.preset != self.default.preset)

    def best_text(self) -> str:
        """For a progress line."""
        best = [(c, o) for c, o in self.ranked() if o.violation <= 0][:1]
        return "" if not best else f"{best[0][0]} {best[0][1].values[0]:.4g} {OBJECTIVES[self.objectives[0]]}"

    def front(self) -> list[Tried]:
        """The feasible settings' Pareto front, by the first objective."""
        feasible = {c: o for c, o in self.ranked() if o.violation <= 0}
        points = {c: tuple(s * v for s, v in zip(self.signs, o.values, strict=True)) for c, o in feasible.items()}
        front = [
            c
            for c, p in points.items()
            if not any(q != p and all(b >= a for a, b in zip(p, q, strict=True)) for q in points.values())
        ]
        return list({points[c]: c for c in reversed(front)}.values())[::-1]

    def frame(self, judge: Judge) -> pd.DataFrame:
        """One row per trial."""
        rows = []
        for i, trial in enumerate(self._finished()):
            if "repeated" in trial.user_attrs:
                continue
            candidate = self._candidate_of(trial)
            whole = trial.state == TrialState.COMPLETE and "refused" not in trial.user_attrs
            row: dict[str, Any] = {
                "trial": i,  # Optuna counts a killed and repeated trial twice
                "policy": candidate.spec,
                "replicas": candidate.to_json()["replicas"],
                "state": "refused" if "refused" in trial.user_attrs else trial.state.name.lower(),
            }
            row |= dict(zip(self.objectives, trial.values if whole else [None] * len(self.objectives), strict=True))
            row["attainment"] = trial.user_attrs.get("attainment") if whole else None
            row["violation"] = trial.user_attrs.get("violation")
            row["reason"] = trial.user_attrs.get("refused") or trial.user_attrs.get("missed") or ""
            row["quality"] = None if "refused" in trial.user_attrs else judge(candidate).relative
            row |= candidate.columns
            rows.append(row)
        return pd.DataFrame(rows)

    def _finished(self) -> list[FrozenTrial]:
        """Without interrupted trials."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _counted(self) -> list[FrozenTrial]:
        """Finished trials with a replay."""
        return [t for t in self._finished() if not {"refused", "repeated"} & t.user_attrs.keys()]

    def _try(self, asked: Sequence[tuple[optuna.Trial, Tried]], refuse: Refuse, prune: float | None) -> None:
        """Replay proposed settings and tell the study."""
        new = self._unseen(asked, refuse)
        if prune is not None:
            first = self.measure([(c, Part("search", share=prune)) for _, c in new])
            new = self._promising(new, first)
        whole = self.measure([(c, Part("search")) for _, c in new])
        for (trial, candidate), outcome in zip(new, whole, strict=True):
            self.seen[candidate] = outcome
            self._tell(trial, outcome)
        for trial, candidate in asked:  # proposed before
            if self.study.trials[trial.number].state == TrialState.RUNNING:
                trial.set_user_attr("repeated", True)
                if candidate in self.seen:
                    self._tell(trial, self.seen[candidate])
                else:
                    self.study.tell(trial, state=TrialState.PRUNED)

    def _unseen(self, asked: Sequence[tuple[optuna.Trial, Tried]], refuse: Refuse) -> list[tuple[optuna.Trial, Tried]]:
        """The settings to replay."""
        new: list[tuple[optuna.Trial, Tried]] = []
        for trial, candidate in asked:
            trial.set_user_attr("policy", candidate.spec)
            reason = refuse(candidate)
            if reason:
                trial.set_user_attr("refused", reason)
                trial.set_user_attr("violation", INFEASIBLE)
                self.study.tell(trial, [0.0 if sign > 0 else 1e9 for sign in self.signs])
            elif not (
                candidate in self._pruned
                or any(candidate == c for _, c in new)
                or (candidate in self.seen and any(t.user_attrs["policy"] == candidate.spec for t in self._counted()))
            ):
                new.append((trial, candidate))
        return new

    def _promising(
        self, new: Sequence[tuple[optuna.Trial, Tried]], first: Sequence[ReplayOutcome]
    ) -> list[tuple[optuna.Trial, Tried]]:
        """The settings kept by the pruner after their first requests."""
        left = []
        for (trial, candidate), outcome in zip(new, first, strict=True):
            trial.report(outcome.values[0], 0)
            if trial.should_prune():
                self._pruned.add(candidate)
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                left.append((trial, candidate))
        return left

    def _tell(self, trial: optuna.Trial, outcome: ReplayOutcome) -> None:
        trial.set_user_attr("violation", outcome.violation)
        trial.set_user_attr("missed", outcome.missed)
        trial.set_user_attr("attainment", -1.0 if math.isnan(outcome.attainment) else outcome.attainment)
        trial.set_user_attr("latency", outcome.latency)
        self.study.tell(trial, list(outcome.values))

    def _sampler(self, done: int, idle: int) -> optuna.samplers.BaseSampler:
        """Seeded by the number of finished trials."""
        seed = int(chance.key(self._seed, SAMPLER, done)[0] >> np.uint64(33))
        if idle > EXPLORE:  # TPE repeats known settings
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=self._jobs > 1, constraints_func=_violation
        )

    def _suggest(self, trial: optuna.Trial) -> Tried:
        presets = list(self.space.dimensions)
        preset = presets[0] if len(presets) == 1 else str(trial.suggest_categorical("policy", presets))
        values = {
            name: _suggest(trial, _param(preset, name), dimension)
            for name, dimension in self.space.dimensions[preset].items()
        }
        found: Tried = self.space.candidate(preset, values, self._replicas)
        return found

    def _params(self, candidate: Tried) -> dict[str, Any]:
        """A candidate's values as a trial's parameters."""
        preset = candidate.preset
        params: dict[str, Any] = {"policy": preset} if len(self.space.dimensions) > 1 else {}
        return params | {_param(preset, n): v for n, v in self.space.values_of(candidate).items()}

    def _candidate_of(self, trial: FrozenTrial) -> Tried:
        params = trial.params
        preset = params.get("policy") or next(iter(self.space.dimensions))
        values = {name.removeprefix(_param(preset, "")): value for name, value in params.items() if name != "policy"}
        for name, dimension in self.space.dimensions[preset].items():
            if isinstance(dimension, Choice) and len(dimension.values) == 1:
                values[name] = dimension.values[0]
        found: Tried = self.space.candidate(preset, values, self._replicas)
        return found


def _param(preset: str, name: str) -> str:
    """A dimension's name in the study; a fleet's names its pool already."""
    return f"{preset}.{name}" if preset else name


def _suggest(trial: optuna.Trial, name: str, dimension: Dimension) -> Any:
    if isinstance(dimension, Choice):
        return dimension.values[0] if len(dimension.values) == 1 else trial.suggest_categorical(name, dimension.values)
    if dimension.whole:
        step = 1 if dimension.step is None else int(dimension.step)
        return trial.suggest_int(name, int(dimension.low), int(dimension.high), step=step, log=dimension.log)
    return trial.suggest_float(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)


def _violation(trial: FrozenTrial) -> tuple[float, ...]:
    return (float(trial.user_attrs.get("violation", 0.0)),)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log and warnings."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
