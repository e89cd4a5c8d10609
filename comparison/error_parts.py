"""Divide the error, predicted - measured, among latency model, commit model, front end and scheduling.

Four re-runs of the same requests in simulated time combine the latencies of run l with the commits of run c, each
predicted (p) or measured (m), as X(l, c). Latency and commits are Shapley values of two players, and the parts sum to
the error: docs/compare-parts.md has the formulas.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..engine.errors import DsimError
from ..profiler.profile import Profile
from ..results.metrics import COMPLETED, Floats, latencies, rows_of
from ..results.run import Columns, Run
from .latencies import Latencies, Prices
from .recorded_commits import Commits
from .rerun import CommitsOf, Recording, recording_of, rerun, witness
from .steps import Ints, Journal, prices

Progress = Callable[[int, int], None]  # steps re-run, approximate total
COMMIT_COUNTS = ("commit_rows", "commit_forced", "commit_masks", "commit_unknown")  # as in Commits.counts
# In an engine's log, s after arrival at the engine, as columns `engine_...`.
ENGINE_TIMES = ("scheduled", "first_emission", "last_emission")


@dataclass(frozen=True)
class MetricParts:
    """Mean, error and its parts (s) over the same requests."""

    num: int  # with the metric in both runs and all re-runs
    measured: float
    error: float  # predicted - measured
    latency: float
    commits: float
    scheduling: float
    frontend: float


@dataclass(frozen=True)
class Parts:
    """Every metric's decomposition, and how much is approximate."""

    metrics: Mapping[str, MetricParts]
    latency_steps: int  # priced by recorded latencies, in X(m, p) and X(m, m)
    latency_nearest: int  # of these without a record
    commit_rows: int  # with masks, in X(m, p) and X(p, m)
    commit_forced: int  # of these without a due commit
    commit_masks: int  # looked up
    commit_unknown: int  # of these never committed in the recorded run


def parts(
    predicted: Run,
    measured: Run,
    policy: str,
    p_profile: Profile,
    m_profile: Profile,
    index: Ints,
    progress: Progress = lambda done, total: None,
) -> Parts:
    """Divide a policy's errors; DsimError if a journal does not replay, or its profile gives other latencies.

    index: the requests of both runs.
    """
    logged = measured.info.driver == "client"  # it has no plans
    predicted_run = measured_run = recording_of(predicted, policy, p_profile)
    if not logged:
        measured_run = recording_of(measured, policy, m_profile)
    p_journal, m_journal = Journal.of(predicted, policy), Journal.of(measured, policy)
    p_commits = Commits(p_journal.requests, predicted_run.policy, predicted_run.width)
    m_commits = Commits(m_journal.requests, measured_run.policy, measured_run.width)
    witness(predicted_run, predicted, p_journal, p_commits)
    if logged:
        m_commits.record_log(m_journal, measured_run.policy.block_length)
    else:
        witness(measured_run, measured, m_journal, m_commits)
    _check_prices(predicted, predicted_run, p_journal)
    recorded = Latencies(p_profile.latency, m_journal, predicted_run.policy, logged)
    priced = Prices(p_profile.latency, predicted_run.policy)
    requests = m_journal.requests
    total, count = 4 * len(m_journal), itertools.count(1)

    def on_step() -> None:
        done = next(count)
        if done % 256 == 0:
            progress(done, max(total, done))

    def served(recording: Recording, price: Prices, commits: CommitsOf) -> Columns:
        recorded.restart()
        return rerun(recording, requests, price, commits, on_step)

    pp = served(predicted_run, priced, p_commits.of)
    before = p_commits.counts.copy()
    mp = served(measured_run, recorded, p_commits.of)
    counts = p_commits.counts - before
    pm = served(predicted_run, priced, m_commits.of)
    counts += m_commits.counts
    runs = {"pp": pp, "mp": mp, "pm": pm, "mm": served(measured_run, recorded, m_commits.of)}
    runs |= {"predicted": p_journal.requests, "measured": requests}
    runs |= {"predicted inside": p_journal.requests, "measured inside": requests}
    profile = predicted.info.profiles.get(policy, predicted.info.profile)
    if profile is not None:
        runs["predicted inside"] = p_journal.requests | {"arrival": p_journal.requests["arrival"] + profile.frontend}
    if logged:
        runs["measured inside"] = at_engine(measured, policy, requests)
    return Parts(
        metrics=_parts(runs, index),
        latency_steps=recorded.num_steps,
        latency_nearest=recorded.num_nearest,
        **dict(zip(COMMIT_COUNTS, counts.tolist(), strict=True)),
    )


def per_request(requests: Columns, index: Ints) -> dict[str, Floats]:
    """Latency metrics (s); itl is the mean gap; NaN if not completed."""
    row_of = np.full(int(max(index.max(initial=-1), requests["request"].max(initial=-1))) + 1, -1)
    row_of[requests["request"]] = np.arange(len(requests["request"]))
    rows = row_of[index]
    columns = rows_of(requests, rows)
    done = (rows >= 0) & (columns["status"] == COMPLETED)
    return {name: np.where(done, values, np.nan) for name, values in latencies(columns).items()}


def at_engine(run: Run, policy: str, requests: Columns) -> Columns:
    """Request columns with the times in the engine's log."""
    after_arrival = run.requests(policy, [f"engine_{name}" for name in ENGINE_TIMES])
    times = {name: requests["arrival"] + after_arrival[f"engine_{name}"] for name in ENGINE_TIMES}
    return requests | times | {"finish": times["last_emission"]}


def _parts(runs: Mapping[str, Columns], index: Ints) -> dict[str, MetricParts]:
    """runs: both runs, also without the time outside the engine (inside), and the four re-runs."""
    values = {run: per_request(columns, index) for run, columns in runs.items()}
    metrics = {}
    for name in values["measured"]:
        common = ~np.isnan([latencies[name] for latencies in values.values()]).any(axis=0)
        if not common.any():
            continue
        mean = {run: float(latencies[name][common].mean()) for run, latencies in values.items()}
        p_inside, m_inside = mean["predicted inside"], mean["measured inside"]
        metrics[name] = MetricParts(
            num=int(common.sum()),
            measured=mean["measured"],
            error=mean["predicted"] - mean["measured"],
            latency=((mean["pp"] - mean["mp"]) + (mean["pm"] - mean["mm"])) / 2,
            commits=((mean["pp"] - mean["pm"]) + (mean["mp"] - mean["mm"])) / 2,
            scheduling=(p_inside - mean["pp"]) + (mean["mm"] - m_inside),
            frontend=(mean["predicted"] - p_inside) - (mean["measured"] - m_inside),
        )
    return metrics


def _check_prices(run: Run, recording: Recording, journal: Journal) -> None:
    """DsimError unless the profile's prices are the twin's latencies."""
    priced, latency = prices(recording.profile.latency, journal, recording.policy), journal.steps["latency"]
    wrong = np.flatnonzero(~np.isclose(priced, latency, rtol=1e-9, atol=0))
    if len(wrong):
        i = wrong[0]
        raise DsimError(
            f"{run.folder}: step {int(journal.steps['step'][i])} of {recording.policy.name} took {latency[i]:.6g} s "
            f"and profile {recording.profile.name} prices it at {priced[i]:.6g} s: give the profile that the run was "
            "made with, --profile FILE"
        )
