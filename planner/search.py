"""An Optuna study that proposes settings. After an interrupt it runs again on the stored replays."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ..engine import chance
from .backend import Pool
from .candidate import Candidate
from .memo import Memo
from .objective import HIGHER, INFEASIBLE, OBJECTIVES, Part, ReplayOutcome
from .quality import Quality
from .settings import NEAR, UNTESTED
from .space import Choice, Dimension, Space
from .tuned import Trial

EXPLORE, EXHAUSTED = 3, 100  # batches without a new setting: then random proposals, then the end
SAMPLER = 234  # purpose of draws

Progress = Callable[[str, int, int, str], None]  # phase, done, total, best setting
Refuse = Callable[[Candidate], str]  # why not to replay; empty: replay


@dataclass
class Attempt:
    """A proposal of the study."""

    trial: optuna.Trial
    candidate: Candidate
    state: str = ""  # once finished: complete, pruned, refused or repeated
    reason: str = ""  # why it was refused, or the SLO that it missed
    outcome: ReplayOutcome | None = None

    @property
    def violation(self) -> float:
        if self.state == "refused":
            return INFEASIBLE
        return 0.0 if self.outcome is None else self.outcome.violation


@dataclass(kw_only=True)
class Search:
    """A study and the settings that it has seen."""

    objectives: tuple[str, ...]
    space: Space
    default: Candidate
    evaluate: Callable[[Memo, tuple[Candidate, Part]], ReplayOutcome]
    judge: Callable[[Candidate], Quality]
    pool: Pool
    memo: Memo
    jobs: int
    seed: int
    progress: Progress
    num_replays: int = 0
    outcomes: dict[Candidate, ReplayOutcome] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.signs = tuple(1.0 if name in HIGHER else -1.0 for name in self.objectives)
        self._pruned: set[Candidate] = set()
        directions = [StudyDirection.MAXIMIZE if sign > 0 else StudyDirection.MINIMIZE for sign in self.signs]
        pruner = optuna.pruners.MedianPruner(n_startup_trials=8)
        self.study = optuna.create_study(directions=directions, pruner=pruner)
        for preset in self.space.presets or ("",):
            start = self.default if self.default.preset == preset else self.space.candidate(preset, {})
            choice = {"policy": preset} if len(self.space.presets) > 1 else {}
            self.study.enqueue_trial(choice | self.space.values_of(start))

    def run(self, trials: int, refuse: Refuse, prune: float | None) -> None:
        """Try `trials` settings, or all of a smaller space."""
        idle = 0  # batches in a row without a new setting
        while (done := self._num_tried()) < trials and idle < EXHAUSTED:
            self.progress("searching", done, trials, self.best_text())
            self.study.sampler = self._sampler(idle)
            batch = []
            for _ in range(min(self.jobs, trials - done)):
                trial = self.study.ask()
                batch.append(Attempt(trial, self._suggest(trial)))
            self.attempts += batch
            self._try(batch, refuse, prune)
            idle = 0 if self._num_tried() > done else idle + 1
        self.progress("searching", trials, trials, self.best_text())

    def measure(self, candidates: Sequence[Candidate], part: Part) -> list[ReplayOutcome]:
        self.num_replays += len(candidates)
        # Workers may have another current folder.
        cells = [(replace(candidate, world=candidate.world.located()), part) for candidate in candidates]
        return list(self.memo.map(self.pool, self.evaluate, cells))

    def ranked(self) -> list[tuple[Candidate, ReplayOutcome]]:
        """Settings replayed whole, by the first objective, then latency, then trial."""
        tried = dict.fromkeys(a.candidate for a in self.attempts if a.state == "complete")
        outcomes = [(candidate, self.outcomes[candidate]) for candidate in tried]
        return sorted(outcomes, key=lambda item: (-self.signs[0] * item[1].values[0], item[1].latency))

    def feasible(self) -> list[Candidate]:
        """The candidates that meet every SLO on the run, in the same order."""
        return [candidate for candidate, outcome in self.ranked() if outcome.violation <= 0]

    def worth(self, candidate: Candidate, outcome: ReplayOutcome) -> float:
        """By the first objective, more is better; beyond the engine's tested range a tenth less."""
        value = self.signs[0] * outcome.values[0]
        return value - (UNTESTED - 1) * abs(value) if candidate.untested else value

    def equals(self, best: Candidate, rivals: Sequence[Candidate]) -> list[Candidate]:
        """The settings that are as good in the search, within NEAR."""
        least = self.worth(best, self.outcomes[best])
        least -= (NEAR - 1) * abs(least)
        return [c for c in rivals if self.worth(c, self.outcomes[c]) >= least]

    def best_text(self) -> str:
        """For a progress line."""
        for candidate in self.feasible()[:1]:
            return f"{candidate} {self.outcomes[candidate].values[0]:.4g} {OBJECTIVES[self.objectives[0]]}"
        return ""

    def front(self) -> list[Candidate]:
        """The feasible settings' Pareto front, by the first objective."""
        points = {c: tuple(np.array(self.signs) * self.outcomes[c].values) for c in self.feasible()}
        front: dict[tuple[float, ...], Candidate] = {}
        for candidate, point in points.items():
            worse = any(q != point and all(b >= a for a, b in zip(point, q, strict=True)) for q in points.values())
            if not worse:
                front.setdefault(point, candidate)
        return list(front.values())

    def trials(self) -> tuple[Trial, ...]:
        """Without repeated ones."""
        trials = []
        for index, attempt in enumerate(self.attempts):
            candidate, state, outcome = attempt.candidate, attempt.state, attempt.outcome
            if state == "repeated":
                continue
            values, attainment = {}, None
            if outcome is not None:
                values = dict(zip(self.objectives, outcome.values, strict=True))
                attainment = None if math.isnan(outcome.attainment) else outcome.attainment
            trials.append(Trial(
                trial=index, policy=candidate.spec, replicas=candidate.replicas, state=state, values=values,
                attainment=attainment, violation=None if state == "pruned" else attempt.violation,
                reason=attempt.reason, quality=None if state == "refused" else self.judge(candidate).relative,
                fields=dict(candidate.columns),
            ))  # fmt: skip
        return tuple(trials)

    def _num_tried(self) -> int:
        """Finished attempts with a replay."""
        return sum(a.state in ("complete", "pruned") for a in self.attempts)

    def _try(self, batch: Sequence[Attempt], refuse: Refuse, prune: float | None) -> None:
        """Replay proposed settings and tell the study."""
        new: list[Attempt] = []
        for attempt in batch:
            attempt.reason = refuse(attempt.candidate)
            if attempt.reason:
                self._tell(attempt, "refused", [0.0 if sign > 0 else 1e9 for sign in self.signs])
            elif attempt.candidate not in {*self.outcomes, *self._pruned, *(a.candidate for a in new)}:
                new.append(attempt)
        if prune is not None:
            firsts = self.measure([a.candidate for a in new], Part("search", share=prune))
            new = [a for a, first in zip(new, firsts, strict=True) if self._is_promising(a, first)]
        outcomes = self.measure([a.candidate for a in new], Part("search"))
        for attempt, outcome in zip(new, outcomes, strict=True):
            self.outcomes[attempt.candidate] = attempt.outcome = outcome
            attempt.reason = outcome.missed
            self._tell(attempt, "complete", list(outcome.values))
        for attempt in batch:
            if not attempt.state:  # proposed before
                attempt.outcome = self.outcomes.get(attempt.candidate)
                values = None if attempt.outcome is None else list(attempt.outcome.values)
                self._tell(attempt, "repeated", values)

    def _is_promising(self, attempt: Attempt, first: ReplayOutcome) -> bool:
        """Whether the pruner keeps a setting after its first requests."""
        attempt.trial.report(first.values[0], 0)
        if not attempt.trial.should_prune():
            return True
        self._pruned.add(attempt.candidate)
        self._tell(attempt, "pruned", None)
        return False

    def _tell(self, attempt: Attempt, state: str, values: list[float] | None) -> None:
        attempt.state = state
        self.study.tell(attempt.trial, values, state=TrialState.PRUNED if values is None else None)

    def _sampler(self, idle: int) -> optuna.samplers.BaseSampler:
        """Seeded by the number of finished trials."""
        seed = int(chance.key(self.seed, SAMPLER, len(self.attempts))[0] >> np.uint64(33))
        if idle > EXPLORE:  # TPE repeats known settings
            return optuna.samplers.RandomSampler(seed=seed)

        def constraints(trial: FrozenTrial) -> tuple[float, ...]:
            return (self.attempts[trial.number].violation,)

        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=self.jobs > 1, constraints_func=constraints
        )

    def _suggest(self, trial: optuna.Trial) -> Candidate:
        presets = self.space.presets or ("",)
        preset = presets[0] if len(presets) == 1 else str(trial.suggest_categorical("policy", presets))
        values = {name: _suggest(trial, name, dimension) for name, dimension in self.space.of(preset).items()}
        return self.space.candidate(preset, values)


def _suggest(trial: optuna.Trial, name: str, dimension: Dimension) -> Any:
    if isinstance(dimension, Choice):
        return dimension.values[0] if len(dimension.values) == 1 else trial.suggest_categorical(name, dimension.values)
    if dimension.whole:
        step = int(dimension.step or 1)
        return trial.suggest_int(name, int(dimension.low), int(dimension.high), step=step, log=dimension.log)
    return trial.suggest_float(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)


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
