"""The best settings for a trace: a search over a space of policies, confirmed on traffic that the search never saw."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from joblib import Parallel, delayed
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import stdtrit  # scipy.stats would take a second to import

from ..engine import chance
from ..engine.errors import DsimError, TraceError
from ..engine.policy import to_toml
from ..profiler.profile import Profile
from ..report.metrics import SloVerdict, Summary
from ..report.slo import METRIC_KEYS, STATS, Slo
from ..traces import Trace
from .quality import Quality, QualityTable, quality_of
from .scenario import Scenario
from .space import Candidate, Choice, Dimension, Space, default_space, guarded, runs_on
from .study_file import FINGERPRINT, STUDY, check_same, open_storage

OBJECTIVES = {"goodput": "req/s", "throughput": "tok/s", "cost": "$ per 1000 good requests", "latency": "ms"}
HIGHER = ("goodput", "throughput")
SAMPLERS = ("tpe", "nsga2", "random")
LATENCY_METRIC = "p90:norm_latency"
BASELINE = "lmdeploy-bd32"  # what a team runs today, and the full cache
CONFIDENCE = 0.95
NUM_RERANKED, NUM_RERANKS = 4, 4  # finalists, and replays of each that choose among them
NUM_CONFIRMED = 8  # of a front
MIN_REQUESTS = 20  # of a part of the trace
PRUNE_SHARE, PRUNE_FROM = 0.3, 1000  # of a trial's requests are replayed first, where there are so many
EXPLORE, EXHAUSTED = 3, 100  # proposals of nothing new: after which chance proposes, and after which the search ends
INFEASIBLE = 1.0  # violation of a setting that was not replayed
RERANK, CONFIRM, BLOCKS, SAMPLER = 231, 232, 233, 234  # purposes of draws, apart from the engine's


@dataclass(frozen=True)
class Part:
    """Which traffic a candidate is replayed on."""

    kind: str  # search, rerank (the same part of the trace, other luck) or confirm (the part held out)
    index: int = 0  # of the replication
    share: float = 1.0  # of its requests, from the first


@dataclass(frozen=True)
class Outcome:
    """What a replay showed: the objectives' values, and by how much the worst SLO on the run was missed."""

    values: tuple[float, ...]
    violation: float = 0.0  # relative to the bound; 0 where all hold
    missed: str = ""  # the SLO that was missed most
    attainment: float = math.nan  # share of arrivals that were good
    latency: float = 0.0  # ms, p90 of norm_latency: it decides between equals


Evaluate = Callable[[Candidate, Part], Outcome]
Progress = Callable[[str, int, int, str], None]  # what is being done, done, of, the best so far


@dataclass(frozen=True)
class Estimate:
    """A mean over replications and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Finalist:
    """A setting that was confirmed on fresh luck and held-out traffic, paired with the default."""

    candidate: Candidate
    quality: Quality
    search: tuple[float, ...]  # the objectives in the search: what luck flattered
    values: tuple[Estimate, ...]  # the objectives
    gains: tuple[Estimate, ...]  # over the default, relative; above 0 is better
    meets: float  # share of confirming replays in which every SLO on the run held
    attainment: float  # mean share of arrivals that were good


@dataclass(frozen=True)
class Tuned:
    """What a search found, and how sure that is."""

    objectives: tuple[str, ...]
    recommended: Candidate  # the winner where its gain is confirmed, else the default
    confirmed: bool
    winner: Finalist
    runner_up: Finalist | None
    default: Finalist
    front: tuple[Finalist, ...]  # several objectives: settings of which none beats another in all; else empty
    search_gain: float  # the winner's, relative, in the search itself: what luck flattered
    trials: pd.DataFrame
    importance: Mapping[
        str, float
    ]  # of the winner's preset's fields, in the first objective; empty if too little is known
    space: Space
    notes: tuple[str, ...]
    num_replays: int
    replications: int

    @property
    def policy_toml(self) -> str:
        """The recommended policy as a file that `dsim replay --policy` takes."""
        return to_toml(self.recommended.policy, self.recommended.preset)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints and tune.json holds."""

        def finalist(f: Finalist) -> dict[str, Any]:
            return {
                "policy": f.candidate.spec,
                "replicas": f.candidate.replicas,
                "quality": {**asdict(f.quality), "notes": list(f.quality.notes)},
                "values": {name: asdict(v) for name, v in zip(self.objectives, f.values, strict=True)},
                "gains": {name: asdict(v) for name, v in zip(self.objectives, f.gains, strict=True)},
                "searched": dict(zip(self.objectives, f.search, strict=True)),
                "meets_run_slos": f.meets,
                "attainment": f.attainment,
            }

        out: dict[str, Any] = _finite(
            {
                "schema": 1,
                "objectives": {name: OBJECTIVES[name] for name in self.objectives},
                "recommended": {"policy": self.recommended.spec, "replicas": self.recommended.replicas},
                "confirmed": self.confirmed,
                "winner": finalist(self.winner),
                "runner_up": None if self.runner_up is None else finalist(self.runner_up),
                "default": finalist(self.default),
                "front": [finalist(f) for f in self.front],
                "search_gain": self.search_gain,
                "importance": dict(self.importance),
                "space": self.space.to_json(),
                "notes": list(self.notes),
                "num_trials": len(self.trials),
                "num_replays": self.num_replays,
                "replications": self.replications,
            }
        )
        return out


def tune(
    scenario: Scenario,
    *,
    objectives: Sequence[str] = ("goodput",),
    space: Space | None = None,
    trials: int = 60,
    default: Candidate | None = None,
    storage: str | Path | None = None,
    min_quality: float | None = None,
    quality_table: QualityTable | None = None,
    allow_unknown_quality: bool = False,
    gpu_hour: float | None = None,
    latency_metric: str = LATENCY_METRIC,
    train: float = 0.6,
    replications: int = 10,
    sampler: str = "tpe",
    prune: bool = True,
    jobs: int = 1,
    evaluate: Evaluate | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Search for the policy with the best objective on a scenario's traffic; the scenario's own policy is not used.

    default: the policy to beat; `storage` keeps the trials, and the same call goes on from them until there are
    `trials`. train: the share of the trace, by time, that the search sees. min_quality: relative to the full cache.
    evaluate: replaces the replay. The same seed and jobs give the same result, interrupted or not.
    """
    _check(scenario, objectives, trials, gpu_hour, train, replications, sampler, jobs)
    profile = scenario.loaded_profile()
    if space is None:
        space = default_space(profile, scenario.workload)
    default = default or Candidate(BASELINE, (), scenario.replicas)
    runs_on(profile, scenario.workload)(default.policy)
    declared = space

    def judge(candidate: Candidate) -> Quality:
        return quality_of(candidate.policy, profile.model.name, quality_table)

    if min_quality is not None:
        space = guarded(
            space, lambda p: quality_of(p, profile.model.name, quality_table), min_quality, allow_unknown_quality
        )
    measure = evaluate or Replays(scenario, tuple(objectives), gpu_hour, latency_metric, train)
    fingerprint = {
        **{name: value for name, value in asdict(scenario).items() if name not in ("policy", "slos")},
        "slos": list(scenario.slos),
        "trace_content": _digest(scenario) if evaluate is None else "",
        "profile_content": _hash(repr(profile).encode()),
        "objectives": list(objectives),
        "space": declared.to_json(),
        "default": str(default),
        "min_quality": min_quality,
        "quality_table": None if quality_table is None else _hash(repr(quality_table).encode()),
        "allow_unknown_quality": allow_unknown_quality,
        "gpu_hour": gpu_hour,
        "latency_metric": latency_metric,
        "train": train,
        "sampler": sampler,
        "prune": prune,
    }
    search = _Search(scenario, tuple(objectives), space, default, measure, sampler, jobs, progress or _silent)
    with _quiet():
        search.open(storage, fingerprint)
        refuse = _refusal(judge, min_quality, allow_unknown_quality)
        search.run(trials, refuse, PRUNE_SHARE if prune and search.prunable(evaluate, train) else None)
        return search.finish(trials, replications, judge, min_quality, storage, allow_unknown_quality)


class Replays:
    """Replays a candidate on the part of the trace that the search sees, or on the part held out."""

    def __init__(
        self, scenario: Scenario, objectives: tuple[str, ...], gpu_hour: float | None, latency: str, train: float
    ) -> None:
        self.scenario = scenario
        self.objectives = objectives
        self.gpu_hour = gpu_hour
        self.latency = parse_latency(latency)
        self.train = train
        self.slos = [Slo.parse(text) for text in scenario.slos]

    def __call__(self, candidate: Candidate, part: Part) -> Outcome:
        """One replay."""
        own = replace(self.scenario, policy=candidate.spec, replicas=candidate.replicas)
        if part.kind != "search":
            own = replace(own, seed=fresh_seed(own.seed, RERANK if part.kind == "rerank" else CONFIRM, part.index))
        requests = _requests(replace(own, policy="", replicas=1), part.kind == "confirm", self.train)
        if part.share < 1:
            requests = requests.head(max(1, round(part.share * len(requests))))
        result = own.simulate(requests)
        if result.interrupted:
            raise KeyboardInterrupt
        return self.outcome(candidate, own.summarize(result), own.loaded_profile(), requests.rate)

    def outcome(self, candidate: Candidate, summary: Summary, profile: Profile, offered: float) -> Outcome:
        """The objectives of a run and what it missed; `offered` in req/s."""
        misses = [(_miss(slo, verdict), str(slo)) for slo, verdict in zip(self.slos, summary.slos, strict=True)]
        violation, missed = max(misses, default=(0.0, ""))
        values = tuple(self._value(name, candidate, summary, profile, offered) for name in self.objectives)
        latency = _number(summary.norm_latency_ms.p90, 1e9)
        return Outcome(values, violation, missed if violation > 0 else "", summary.slo_attainment, latency)

    def _value(self, name: str, candidate: Candidate, summary: Summary, profile: Profile, offered: float) -> float:
        # Good requests over the time in which requests came: over the run's own time, which ends with its last
        # request, a policy that serves nobody better would gain by a shorter tail.
        rate = summary.slo_attainment * offered
        # Where no SLO judges requests, all that complete are good, and the SLOs on the run are constraints.
        if math.isnan(rate):
            rate = summary.request_throughput
        if name == "throughput":
            return _number(summary.output_throughput, 0.0)
        if name == "goodput":
            return _number(rate, 0.0)
        if name == "cost":
            assert self.gpu_hour is not None
            # No good request at all is priced as half of one.
            least = 0.5 / summary.duration_s if summary.duration_s > 0 else 1e-9
            hourly = candidate.replicas * profile.device.count * self.gpu_hour
            return 1000 * hourly / (3600 * max(_number(rate, 0.0), least))
        stat, metric = self.latency
        return _number(getattr(getattr(summary, f"{metric}_ms"), stat), 1e9)


def parse_latency(text: str) -> tuple[str, str]:
    """A statistic and a metric from `p90:norm_latency`."""
    stat, _, metric = text.partition(":")
    if stat not in STATS or metric not in METRIC_KEYS:
        raise DsimError(
            f"latency metric is {text!r}, expected STAT:METRIC such as {LATENCY_METRIC}, of {', '.join(STATS)} "
            f"and {', '.join(METRIC_KEYS)}"
        )
    return stat, metric


def split(trace: Trace, train: float) -> tuple[Trace, Trace]:
    """The first part of a trace, by time, and the rest."""
    cut = int(np.searchsorted(trace.arrival, train * trace.duration, side="right"))
    parts = trace.take(np.arange(cut)), trace.take(np.arange(cut, len(trace))) if cut < len(trace) else None
    for part, what in zip(parts, ("the search", "confirmation"), strict=True):
        if part is None or len(part) < MIN_REQUESTS:
            found = 0 if part is None else len(part)
            raise TraceError(f"{trace.name} leaves {found} requests for {what}, expected at least {MIN_REQUESTS}")
    assert parts[1] is not None
    return parts[0], parts[1]


def resampled(trace: Trace, seed: int) -> Trace:
    """As many requests as the trace has, in blocks of consecutive ones drawn anew, each with the gap before it."""
    n = len(trace)
    block = max(1, n // 16)
    starts = chance.uniform(chance.key(seed, BLOCKS, np.arange(-(-n // block)))) * n
    rows = (np.floor(starts).astype(np.int64)[:, None] + np.arange(block)).reshape(-1)[:n] % n
    gaps = np.diff(trace.arrival, prepend=-trace.duration / max(1, n - 1))
    return trace.take(rows, np.cumsum(gaps[rows]))


def fresh_seed(seed: int, purpose: int, index: int) -> int:
    """A seed for replication `index`, apart from the search's."""
    return int(chance.key(seed, purpose, index)[0] >> np.uint64(2))


def estimate(values: Sequence[float], scale: float = 1.0) -> Estimate:
    """The mean over replications and Student's interval, over `scale`."""
    data = np.asarray(values, float) / scale
    mean = float(data.mean())
    half = math.inf
    if len(data) > 1:
        half = float(stdtrit(len(data) - 1, (1 + CONFIDENCE) / 2)) * float(data.std(ddof=1)) / math.sqrt(len(data))
    return Estimate(mean, mean - half, mean + half)


def gain(values: Sequence[float], base: Sequence[float], sign: float) -> Estimate:
    """The relative gain of a mean over that of the default, paired by replication; sign -1 where less is better.

    The interval is that of a ratio: of each replication's distance from the line through zero that the ratio is.
    """
    mine, other = np.asarray(values, float), np.asarray(base, float)
    mean = float(other.mean())
    if not mean > 0:
        return Estimate(math.nan, math.nan, math.nan)
    ratio = float(mine.mean()) / mean
    spread = estimate(list(sign * (mine - ratio * other)), mean)
    value = sign * (ratio - 1)
    return Estimate(value, value + spread.low, value + spread.high)


class _Search:
    """A study and what it takes to run and finish it."""

    def __init__(
        self,
        scenario: Scenario,
        objectives: tuple[str, ...],
        space: Space,
        default: Candidate,
        measure: Evaluate,
        sampler: str,
        jobs: int,
        progress: Progress,
    ) -> None:
        self.scenario = scenario
        self.objectives = objectives
        self.space = space
        self.default = default
        self.measure = measure
        self.sampler = sampler
        self.progress = progress
        self.signs = tuple(1.0 if name in HIGHER else -1.0 for name in objectives)
        self.pool = Parallel(n_jobs=jobs) if jobs > 1 else None
        self.jobs = jobs
        self.seen: dict[Candidate, Outcome] = {}
        self.pruned: set[Candidate] = set()
        self.num_replays = 0

    def prunable(self, evaluate: Evaluate | None, train: float) -> bool:
        """Whether a trial can stop after its first requests: one objective, and enough of them."""
        if len(self.objectives) > 1 or evaluate is not None:
            return False
        return len(_requests(replace(self.scenario, policy="", replicas=1), False, train)) >= PRUNE_FROM

    def open(self, storage: str | Path | None, fingerprint: Mapping[str, Any]) -> None:
        """Begin the study, or go on with the one in the file."""
        kept = None if storage is None else open_storage(storage)
        directions = [StudyDirection.MAXIMIZE if sign > 0 else StudyDirection.MINIMIZE for sign in self.signs]
        if kept is not None:
            check_same(kept, str(storage), fingerprint)
        self.study = optuna.create_study(
            storage=kept, study_name=STUDY, directions=directions, load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=8),
        )  # fmt: skip
        if FINGERPRINT not in self.study.user_attrs:
            self.study.set_user_attr(FINGERPRINT, dict(fingerprint))
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING:  # its process was killed
                self.study.tell(trial.number, state=TrialState.FAIL)
                self.study.enqueue_trial(trial.params)
            elif trial.state == TrialState.COMPLETE and "refused" not in trial.user_attrs:
                self.seen[self._candidate_of(trial)] = self._outcome_of(trial)
            elif trial.state == TrialState.PRUNED:
                self.pruned.add(self._candidate_of(trial))
        if not self.study.get_trials(deepcopy=False):
            for preset in self.space.dimensions:
                start = self.default if self.default.preset == preset else Candidate(preset, (), self.default.replicas)
                self.study.enqueue_trial(self._params(start))

    def run(self, trials: int, refuse: Callable[[Candidate], str], prune: float | None) -> None:
        """Go on until so many different settings were tried, or there are no more."""
        idle = 0  # times in a row that the sampler proposed nothing new
        while (done := len(self._counted())) < trials and idle < EXHAUSTED:
            self.progress("searching", done, trials, self._best_text())
            self.study.sampler = self._sampler(len(self._finished()), idle)
            asked: list[tuple[optuna.Trial, Candidate]] = []
            try:
                for _ in range(min(self.jobs, trials - done)):
                    trial = self.study.ask()
                    asked.append((trial, self._suggest(trial)))
                self._try(asked, refuse, prune)
            except BaseException:
                for trial, _ in asked:
                    if self.study.trials[trial.number].state == TrialState.RUNNING:
                        params = trial.params
                        self.study.tell(trial, state=TrialState.FAIL)
                        self.study.enqueue_trial(params)
                raise
            idle = 0 if len(self._counted()) > done else idle + 1
        self.progress("searching", trials, trials, self._best_text())

    def _finished(self) -> list[FrozenTrial]:
        """Trials that ended by themselves."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _counted(self) -> list[FrozenTrial]:
        """Those of them that replayed something."""
        return [t for t in self._finished() if not {"refused", "repeated"} & t.user_attrs.keys()]

    def finish(
        self,
        trials: int,
        replications: int,
        judge: Callable[[Candidate], Quality],
        min_quality: float | None,
        storage: str | Path | None,
        allow_unknown: bool,
    ) -> Tuned:
        """Choose among the best and confirm them."""
        feasible = {c: o for c, o in self._ranked() if o.violation <= 0}
        if not feasible:
            where = "" if storage is None else f"; the trials are kept in {storage}"
            tried = [(o.violation, c, o.missed) for c, o in self._ranked()]
            if not tried:
                raise DsimError(f"none of {trials} trials could run{where}")
            excess, candidate, missed = min(tried, key=lambda t: t[0])
            raise DsimError(
                f"no setting of {trials} trials meets {missed}; the closest, {candidate}, "
                f"misses it by {100 * excess:.0f} %{where}"
            )
        one = len(self.objectives) == 1
        chosen = self._rerank(list(feasible)) if one else self._front(feasible)
        known = [self.default, *(c for c in chosen if c != self.default)]
        outcomes = self._confirm(known, replications)
        if self.default not in self.seen:
            self.seen[self.default] = self._measure_all([(self.default, Part("search"))])[0]
        finalists = {c: self._finalist(c, outcomes, judge(c)) for c in known}
        winner, default = finalists[chosen[0]], finalists[self.default]
        ok, notes = self._verdict(winner, default, min_quality, allow_unknown)
        found, base = self.seen[winner.candidate].values[0], self.seen[self.default].values[0]
        return Tuned(
            objectives=self.objectives,
            recommended=winner.candidate if ok else self.default,
            confirmed=ok,
            winner=winner,
            runner_up=finalists[chosen[1]] if len(chosen) > 1 else None,
            default=default,
            front=() if one else tuple(finalists[c] for c in chosen),
            search_gain=self.signs[0] * (found - base) / abs(base) if base else math.nan,
            trials=self._frame(judge),
            importance=self._importance(winner.candidate.preset),
            space=self.space,
            notes=(*self.space.notes, *notes),
            num_replays=self.num_replays,
            replications=replications,
        )

    def _try(
        self, asked: Sequence[tuple[optuna.Trial, Candidate]], refuse: Callable[[Candidate], str], prune: float | None
    ) -> None:
        """Replay what was asked for, and tell."""
        new: list[tuple[optuna.Trial, Candidate]] = []
        for trial, candidate in asked:
            trial.set_user_attr("policy", candidate.spec)
            trial.set_user_attr("replicas", candidate.replicas)
            reason = refuse(candidate)
            if reason:
                trial.set_user_attr("refused", reason)
                trial.set_user_attr("violation", INFEASIBLE)
                self.study.tell(trial, [0.0 if sign > 0 else 1e9 for sign in self.signs])
            elif candidate in self.seen and any(t.user_attrs["policy"] == candidate.spec for t in self._counted()):
                trial.set_user_attr("repeated", True)
                self._tell(trial, self.seen[candidate])
            elif candidate in self.pruned:
                trial.set_user_attr("repeated", True)
                self.study.tell(trial, state=TrialState.PRUNED)
            elif all(candidate != c for _, c in new):
                new.append((trial, candidate))
        if prune is not None:
            left = []
            first = self._measure_all([(c, Part("search", share=prune)) for _, c in new])
            for (trial, candidate), outcome in zip(new, first, strict=True):
                trial.report(outcome.values[0], 0)
                if trial.should_prune():
                    self.pruned.add(candidate)
                    self.study.tell(trial, state=TrialState.PRUNED)
                else:
                    left.append((trial, candidate))
            new = left
        for (trial, candidate), outcome in zip(
            new, self._measure_all([(c, Part("search")) for _, c in new]), strict=True
        ):
            self.seen[candidate] = outcome
            self._tell(trial, outcome)
        for trial, candidate in asked:  # asked for twice at once
            if self.study.trials[trial.number].state == TrialState.RUNNING:
                trial.set_user_attr("repeated", True)
                if candidate in self.seen:
                    self._tell(trial, self.seen[candidate])
                else:
                    self.study.tell(trial, state=TrialState.PRUNED)

    def _tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        trial.set_user_attr("violation", outcome.violation)
        trial.set_user_attr("missed", outcome.missed)
        trial.set_user_attr("attainment", _number(outcome.attainment, -1.0))
        trial.set_user_attr("latency", outcome.latency)
        self.study.tell(trial, list(outcome.values))

    def _measure_all(self, work: Sequence[tuple[Candidate, Part]]) -> list[Outcome]:
        self.num_replays += len(work)
        if self.pool is None or len(work) < 2:
            return [self.measure(candidate, part) for candidate, part in work]
        return list(self.pool(delayed(self.measure)(candidate, part) for candidate, part in work))

    def _ranked(self) -> list[tuple[Candidate, Outcome]]:
        """What was replayed whole in a trial, best first in the first objective; equals by latency, then by trial."""
        tried = dict.fromkeys(self._candidate_of(t) for t in self._counted() if t.state == TrialState.COMPLETE)
        return sorted(((c, self.seen[c]) for c in tried), key=lambda item: self._order(item[1]))

    def _order(self, outcome: Outcome) -> tuple[float, float]:
        return -self.signs[0] * outcome.values[0], outcome.latency

    def _rerank(self, ranked: list[Candidate]) -> list[Candidate]:
        """The best few by fresh luck on the part that the search saw: a lucky one falls back."""
        few = ranked[:NUM_RERANKED]
        if len(few) < 2:
            return few
        scores: dict[Candidate, tuple[float, float]] = dict.fromkeys(few, (0.0, 0.0))
        missed: dict[Candidate, int] = dict.fromkeys(few, 0)
        for index in range(NUM_RERANKS):
            self.progress("ranking", index, NUM_RERANKS, self._best_text())
            outcomes = self._measure_all([(c, Part("rerank", index)) for c in few])
            for c, outcome in zip(few, outcomes, strict=True):
                value, latency = self._order(outcome)
                scores[c] = scores[c][0] + value, scores[c][1] + latency
                missed[c] += outcome.violation > 0
        return sorted(few, key=lambda c: (2 * missed[c] > NUM_RERANKS, scores[c]))[:2]

    def _front(self, feasible: Mapping[Candidate, Outcome]) -> list[Candidate]:
        """The settings that no other beats in every objective, best first in the first one; a spread of them."""
        points = {c: tuple(s * v for s, v in zip(self.signs, o.values, strict=True)) for c, o in feasible.items()}
        front = [
            c
            for c, p in points.items()
            if not any(q != p and all(b >= a for a, b in zip(p, q, strict=True)) for q in points.values())
        ]
        distinct = list({points[c]: c for c in reversed(front)}.values())[::-1]
        if len(distinct) <= NUM_CONFIRMED:
            return distinct
        return [distinct[round(i)] for i in np.linspace(0, len(distinct) - 1, NUM_CONFIRMED)]

    def _confirm(self, candidates: Sequence[Candidate], replications: int) -> dict[Candidate, list[Outcome]]:
        """Every candidate on the same held-out traffic, replication by replication."""
        found: dict[Candidate, list[Outcome]] = {c: [] for c in candidates}
        for index in range(replications):
            self.progress("confirming", index, replications, self._best_text())
            outcomes = self._measure_all([(c, Part("confirm", index)) for c in candidates])
            for c, outcome in zip(candidates, outcomes, strict=True):
                found[c].append(outcome)
        self.progress("confirming", replications, replications, self._best_text())
        return found

    def _finalist(
        self, candidate: Candidate, outcomes: Mapping[Candidate, list[Outcome]], quality: Quality
    ) -> Finalist:
        mine, base = outcomes[candidate], outcomes[self.default]
        values, gains = [], []
        for i, sign in enumerate(self.signs):
            values.append(estimate([o.values[i] for o in mine]))
            gains.append(gain([o.values[i] for o in mine], [o.values[i] for o in base], sign))
        return Finalist(
            candidate=candidate,
            quality=quality,
            search=self.seen[candidate].values,
            values=tuple(values),
            gains=tuple(gains),
            meets=float(np.mean([o.violation <= 0 for o in mine])),
            attainment=float(np.mean([o.attainment for o in mine])),
        )

    def _verdict(
        self, winner: Finalist, default: Finalist, min_quality: float | None, allow_unknown: bool
    ) -> tuple[bool, list[str]]:
        """Whether the winner is to be recommended, and what is to be said about it."""
        notes = []
        gain = winner.gains[0]
        name = self.objectives[0]
        usable = default.meets >= 0.5
        if min_quality is not None:
            known = default.quality.relative
            usable = usable and (allow_unknown if known is None else known >= min_quality)
        if winner.candidate == self.default:
            notes.append("the search found nothing better than the default")
            ok = True
        elif winner.meets < 0.5:
            notes.append(f"the winner of the search misses an SLO in {1 - winner.meets:.0%} of held-out replays")
            ok = False
        elif math.isnan(gain.value) or gain.low > 0 or not usable:
            ok = True
            if not usable:
                notes.append("the default itself misses an SLO or the quality asked for, and cannot be recommended")
        else:
            notes.append(f"the gain in {name} over the default is not confirmed: the default is recommended")
            ok = False
        if (winner if ok else default).quality.relative is None:
            reason = (winner if ok else default).quality.notes[0]
            notes.append(f"the quality of the recommended policy is unknown: {reason}")
        if name in ("goodput", "cost") and default.attainment > 0.995 and winner.attainment > 0.995:
            notes.append(
                "the default already serves nearly every request well: a higher --rate would tell settings apart"
            )
        return ok, notes

    def _frame(self, judge: Callable[[Candidate], Quality]) -> pd.DataFrame:
        """The trials, one row each."""
        rows = []
        for trial in self._finished():
            if "repeated" in trial.user_attrs:
                continue
            candidate = self._candidate_of(trial)
            whole = trial.state == TrialState.COMPLETE and "refused" not in trial.user_attrs
            row: dict[str, Any] = {
                "trial": trial.number,
                "policy": candidate.spec,
                "replicas": candidate.replicas,
                "state": "refused" if "refused" in trial.user_attrs else trial.state.name.lower(),
            }
            row |= dict(zip(self.objectives, trial.values if whole else [None] * len(self.objectives), strict=True))
            row["attainment"] = trial.user_attrs.get("attainment") if whole else None
            row["violation"] = trial.user_attrs.get("violation")
            row["reason"] = trial.user_attrs.get("refused") or trial.user_attrs.get("missed") or ""
            row["quality"] = None if "refused" in trial.user_attrs else judge(candidate).relative
            row |= {f"{candidate.preset}.{n}": v for n, v in candidate.settings}
            rows.append(row)
        return pd.DataFrame(rows)

    def _importance(self, preset: str) -> dict[str, float]:
        """How much of the first objective each of a preset's parameters explains (PED-ANOVA)."""
        counted = [t for t in self._counted() if t.state == TrialState.COMPLETE]
        complete = [t for t in counted if self._candidate_of(t).preset == preset]
        if len(complete) < 10 or len({t.values[0] for t in complete}) < 3:
            return {}
        shared = set.intersection(*(set(t.params) for t in complete)) - {"policy"}
        if len(shared) < 2:
            return {}
        try:
            found = optuna.importance.get_param_importances(
                self.study, evaluator=PedAnovaImportanceEvaluator(), params=sorted(shared), target=lambda t: t.values[0]
            )
        except (ValueError, RuntimeError):  # nothing varied
            return {}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _sampler(self, done: int, idle: int) -> optuna.samplers.BaseSampler:
        """A sampler that depends on how many trials are finished, so that a resumed search goes on as it would have."""
        seed = int(chance.key(self.scenario.seed, SAMPLER, done)[0] >> np.uint64(33))
        if self.sampler == "random" or idle > EXPLORE:  # a sampler that circles one spot is sent elsewhere
            return optuna.samplers.RandomSampler(seed=seed)
        if self.sampler == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=20, constraints_func=_violation)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=self.jobs > 1, constraints_func=_violation
        )

    def _suggest(self, trial: optuna.Trial) -> Candidate:
        presets = list(self.space.dimensions)
        preset = presets[0] if len(presets) == 1 else str(trial.suggest_categorical("policy", presets))
        values = {
            name: _suggest(trial, f"{preset}.{name}", dimension)
            for name, dimension in self.space.dimensions[preset].items()
        }
        return self.space.candidate(preset, values, self.scenario.replicas)

    def _params(self, candidate: Candidate) -> dict[str, Any]:
        """A candidate as a trial's parameters, as far as the space has them."""
        preset = candidate.preset
        params: dict[str, Any] = {"policy": preset} if len(self.space.dimensions) > 1 else {}
        return params | {f"{preset}.{n}": v for n, v in self.space.values_of(candidate).items()}

    def _candidate_of(self, trial: FrozenTrial) -> Candidate:
        params = trial.params
        preset = params.get("policy") or next(iter(self.space.dimensions))
        values = {name.partition(".")[2]: value for name, value in params.items() if name != "policy"}
        for name, dimension in self.space.dimensions[preset].items():
            if isinstance(dimension, Choice) and len(dimension.values) == 1:
                values[name] = dimension.values[0]
        return self.space.candidate(preset, values, self.scenario.replicas)

    def _outcome_of(self, trial: FrozenTrial) -> Outcome:
        attrs = trial.user_attrs
        attainment = attrs.get("attainment", -1.0)
        values = tuple(trial.values)
        attainment = math.nan if attainment < 0 else attainment
        return Outcome(values, attrs["violation"], attrs["missed"], attainment, attrs["latency"])

    def _best_text(self) -> str:
        best = [(c, o) for c, o in self._ranked() if o.violation <= 0][:1]
        return "" if not best else f"{best[0][0]} {best[0][1].values[0]:.4g} {OBJECTIVES[self.objectives[0]]}"


def _suggest(trial: optuna.Trial, name: str, dimension: Dimension) -> Any:
    if isinstance(dimension, Choice):
        return dimension.values[0] if len(dimension.values) == 1 else trial.suggest_categorical(name, dimension.values)
    if dimension.whole:
        step = 1 if dimension.step is None else int(dimension.step)
        return trial.suggest_int(name, int(dimension.low), int(dimension.high), step=step, log=dimension.log)
    return trial.suggest_float(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)


def _refusal(
    judge: Callable[[Candidate], Quality], min_quality: float | None, allow_unknown: bool
) -> Callable[[Candidate], str]:
    """Why a candidate is not worth a replay; empty where it is."""

    def refuse(candidate: Candidate) -> str:
        try:
            quality = judge(candidate)
        except DsimError as error:  # fields that do not go together
            return str(error)
        if min_quality is None:
            return ""
        if quality.relative is None:
            return "" if allow_unknown else f"quality unknown: {quality.notes[0]}"
        return (
            "" if quality.relative >= min_quality else f"quality {quality}, expected at least {100 * min_quality:g} %"
        )

    return refuse


def _miss(slo: Slo, verdict: SloVerdict) -> float:
    """By how much of its bound an SLO on the run is missed; 0 where it holds, or judges requests."""
    if verdict.met is None or verdict.met:
        return 0.0
    if slo.share is not None:
        return max((slo.share - verdict.attainment) / slo.share, 1e-9) if verdict.attainment >= 0 else INFEASIBLE
    if math.isnan(verdict.observed_ms):
        return INFEASIBLE
    return max(verdict.observed_ms / (1e3 * slo.bound) - 1, 1e-9)


def _violation(trial: FrozenTrial) -> tuple[float, ...]:
    return (float(trial.user_attrs.get("violation", 0.0)),)


@lru_cache(maxsize=8)
def _requests(scenario: Scenario, held_out: bool, train: float) -> Trace:
    """The part of the trace: as it is for the search; redrawn by the seed where it is held out."""
    requests = split(scenario.requests(), train)[int(held_out)]
    # An arrival process is drawn anew by the seed already; times of the trace's own are resampled in blocks.
    return resampled(requests, scenario.seed) if held_out and scenario.arrival == "trace" else requests


def _digest(scenario: Scenario) -> str:
    trace = scenario.source()
    return _hash(b"".join(c.tobytes() for c in (trace.arrival, trace.input_length, trace.output_length)))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _check(
    scenario: Scenario,
    objectives: Sequence[str],
    trials: int,
    gpu_hour: float | None,
    train: float,
    replications: int,
    sampler: str,
    jobs: int,
) -> None:
    for name in objectives:
        if name not in OBJECTIVES:
            raise DsimError(f"no objective is named {name}, expected one of {', '.join(OBJECTIVES)}")
    if not objectives or len(set(objectives)) < len(objectives):
        raise DsimError(f"objectives are {', '.join(objectives) or 'none'}, expected one or several different ones")
    if not scenario.slos and {"goodput", "cost"} & set(objectives):
        raise DsimError("goodput and cost count requests that meet an SLO, expected an --slo such as ttft=2s")
    if "cost" in objectives and not (gpu_hour is not None and 0 < gpu_hour < math.inf):
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price above 0 where cost is an objective")
    if sampler not in SAMPLERS:
        raise DsimError(f"no sampler is named {sampler}, expected one of {', '.join(SAMPLERS)}")
    if not 0 < train < 1:
        raise DsimError(f"train is {train}, expected a share of the trace between 0 and 1")
    for name, value, least in (("trials", trials, 1), ("replications", replications, 2), ("jobs", jobs, 1)):
        if value < least:
            raise DsimError(f"{name} is {value}, expected at least {least}")
    if scenario.concurrency is not None:
        raise DsimError("a closed loop has no held-out traffic, expected arrivals")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's log, and its warnings about options that its versions call new or old."""
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


def _number(value: float, missing: float) -> float:
    return missing if math.isnan(value) else value


def _finite(value: Any) -> Any:
    """NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _silent(_doing: str, _done: int, _of: int, _best: str) -> None:
    """No progress."""
