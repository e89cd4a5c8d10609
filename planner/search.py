"""An Optuna study that proposes settings. After an interrupt it runs again on the stored replays."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import optuna

from ..engine import chance
from .backend import Pool
from .candidate import POLICY, Candidate, spelt
from .memo import Memo
from .objective import HIGHER, INFEASIBLE, Evaluator, Part, ReplayOutcome
from .quality import Quality
from .settings import NEAR, UNTESTED
from .space import Space

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", module="optuna")

EXPLORE, EXHAUSTED = 3, 100  # batches without a new setting: then random proposals, then the end
SAMPLER = 234  # purpose of draws

Progress = Callable[[str, int, int], None]  # phase, done, total
Refuse = Callable[[Candidate], str]  # why not to replay; empty: replay


@dataclass
class Attempt:
    """A proposal of the study."""

    trial: optuna.Trial
    candidate: Candidate
    state: str = ""  # once finished: complete, refused or repeated
    reason: str = ""  # why it was refused, or the SLO that it missed
    outcome: ReplayOutcome | None = None

    @property
    def violation(self) -> float:
        if self.outcome is None:  # refused, or under way
            return INFEASIBLE * (self.state == "refused")
        return self.outcome.violation


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A row of trials.csv."""

    trial: int
    policy: str
    replicas: int
    state: str  # complete or refused
    value: float | None  # of the objective; None: refused
    violation: float | None  # relative to the bound of the worst SLO
    reason: str  # of a refusal, or the missed SLO
    fields: Mapping[str, str]  # the point of the space


@dataclass(kw_only=True)
class Search:
    """A study and the settings that it has tried."""

    objective: str
    space: Space
    default: Candidate
    evaluate: Evaluator
    judge: Callable[[Candidate], Quality]
    pool: Pool
    memo: Memo
    jobs: int
    progress: Progress
    num_replays: int = 0
    outcomes: dict[Candidate, ReplayOutcome] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sign = 2.0 * (self.objective in HIGHER) - 1
        self.study = optuna.create_study(direction=("minimize", "maximize")[self.sign > 0])
        for preset in self.space.presets:
            fields = self.space.candidate(preset, {}).fields()
            if self.default.preset == preset:
                fields = self.default.fields()
            places = {POLICY: self.space.presets.index(preset)}
            for name, values in self.space.of(preset).items():
                texts = [spelt(value) for value in values]
                if fields[name] in texts:
                    places[f"{preset}.{name}"] = texts.index(fields[name])
            self.study.enqueue_trial(places)

    def run(self, trials: int, refuse: Refuse) -> None:
        """Try `trials` settings, or all of a smaller space."""
        idle = 0  # batches in a row without a new setting
        while (done := self._num_tried()) < trials and idle < EXHAUSTED:
            self.progress("searching", done, trials)
            self.study.sampler = self._sampler(idle)
            batch = []
            for _ in range(min(self.jobs, trials - done)):
                trial = self.study.ask()
                batch.append(Attempt(trial, self._suggest(trial)))
            self.attempts += batch
            self._try(batch, refuse)
            idle = (idle + 1) * (self._num_tried() == done)
        self.progress("searching", trials, trials)

    def measure(self, candidates: Sequence[Candidate], part: Part) -> list[ReplayOutcome]:
        self.num_replays += len(candidates)
        # Workers may have another current folder.
        cells = [(replace(candidate, world=candidate.world.located()), part) for candidate in candidates]
        answers = self.memo.map(self.pool, self.evaluate, cells, self.evaluate.question)
        return [ReplayOutcome(**answer) for answer in answers]

    def ranked(self) -> list[tuple[Candidate, ReplayOutcome]]:
        """Settings by the objective, then latency, then trial."""
        tried = dict.fromkeys(a.candidate for a in self.attempts if a.state == "complete")
        outcomes = [(candidate, self.outcomes[candidate]) for candidate in tried]
        return sorted(outcomes, key=lambda item: (-self.sign * item[1].value, item[1].latency))

    def feasible(self) -> list[Candidate]:
        """The candidates that meet every SLO on the run, in the same order."""
        return [candidate for candidate, outcome in self.ranked() if outcome.violation <= 0]

    def worth(self, candidate: Candidate, outcome: ReplayOutcome) -> float:
        """By the objective, more is better; beyond the engine's tested range a tenth less."""
        value = self.sign * outcome.value
        if candidate.untested:
            value -= (UNTESTED - 1) * abs(value)
        return value

    def equals(self, best: Candidate, rivals: Sequence[Candidate]) -> list[Candidate]:
        """The settings that are as good in the search, within NEAR."""
        least = self.worth(best, self.outcomes[best])
        least -= (NEAR - 1) * abs(least)
        return [c for c in rivals if self.worth(c, self.outcomes[c]) >= least]

    def trials(self) -> tuple[Trial, ...]:
        """Without repeated ones."""
        return tuple(
            Trial(
                trial=index,
                policy=attempt.candidate.world.policy,
                replicas=attempt.candidate.world.replicas,
                state=attempt.state,
                value=attempt.outcome.value if attempt.outcome else None,
                violation=attempt.violation,
                reason=attempt.reason,
                fields=dict(attempt.candidate.columns),
            )
            for index, attempt in enumerate(self.attempts)
            if attempt.state != "repeated"
        )

    def _num_tried(self) -> int:
        return sum(attempt.state == "complete" for attempt in self.attempts)

    def _try(self, batch: Sequence[Attempt], refuse: Refuse) -> None:
        """Replay proposed settings and tell the study."""
        new: dict[Candidate, Attempt] = {}
        for attempt in batch:
            attempt.reason = refuse(attempt.candidate)
            if attempt.reason:
                self._tell(attempt, "refused", 1e9 * (self.sign < 0))
            elif attempt.candidate not in self.outcomes:
                new.setdefault(attempt.candidate, attempt)
        outcomes = self.measure(list(new), Part("search"))
        self.outcomes |= dict(zip(new, outcomes, strict=True))
        for attempt in batch:
            if attempt.state:
                continue
            attempt.outcome = outcome = self.outcomes[attempt.candidate]
            attempt.reason = outcome.missed
            is_new = new.get(attempt.candidate) is attempt
            self._tell(attempt, ("repeated", "complete")[is_new], outcome.value)

    def _tell(self, attempt: Attempt, state: str, value: float) -> None:
        attempt.state = state
        self.study.tell(attempt.trial, value)

    def _sampler(self, idle: int) -> optuna.samplers.BaseSampler:
        """Seeded by the number of finished trials."""
        seed = int(chance.key(self.default.world.seed, SAMPLER, len(self.attempts))[0] >> np.uint64(33))
        if idle > EXPLORE:  # TPE repeats known settings
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            seed=seed,
            multivariate=True,
            group=True,
            constant_liar=self.jobs > 1,
            constraints_func=lambda trial: (self.attempts[trial.number].violation,),
        )

    def _suggest(self, trial: optuna.Trial) -> Candidate:
        """Values have an order: the study proposes their places."""
        presets = self.space.presets
        preset = presets[trial.suggest_categorical(POLICY, range(len(presets)))]
        fields = {
            name: values[trial.suggest_int(f"{preset}.{name}", 0, len(values) - 1)]
            for name, values in self.space.of(preset).items()
        }
        return self.space.candidate(preset, fields)
