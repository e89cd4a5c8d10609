"""Divide the error, predicted - measured, among latency model, commit model, front end and scheduling.

Four re-runs of the same requests in simulated time combine the latencies of run l with the commits of run c, each
predicted (p) or measured (m), as X(l, c):

    latency     = 1/2 [X(p, p) - X(m, p)] + 1/2 [X(p, m) - X(m, m)]
    commits     = 1/2 [X(p, p) - X(p, m)] + 1/2 [X(m, p) - X(m, m)]
    front end   = the profile's time outside the engine - the client's beyond its engine's log
    scheduling  = [predicted - X(p, p)] + [X(m, m) - measured], both without the front end

Latency and commits are Shapley values of two players, and the parts sum to the error. See docs/compare-parts.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine import cache_overhead
from ..engine.errors import DsimError
from ..profiler.profile import Profile
from ..results.metrics import COMPLETED, Floats, latencies, rows_of
from ..results.run import Columns, Run
from .commits import Commits
from .latencies import Latencies
from .rerun import Price, World, drawn, rerun, witness, world_of
from .steps import Ints, Lists, prices
from .summaries import is_client

Indices = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # steps re-run, approximate total


@dataclass(frozen=True)
class MetricParts:
    """Mean, error and its parts (s) over the same requests."""

    num: int  # with the metric in both runs and all re-runs
    measured: float
    error: float  # predicted - measured
    latency: float
    commits: float
    scheduling: float
    frontend: float = 0.0
    seed: float = math.nan  # s, standard deviation of the predicted mean over seeds alone; NaN: no other seed


@dataclass(frozen=True)
class Parts:
    """Every metric's decomposition, and how much is approximate."""

    metrics: dict[str, MetricParts]
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
    index: Indices,
    progress: Progress | None = None,
    seeds: int = 0,
) -> Parts:
    """Divide a policy's errors; DsimError if a journal does not replay, or its profile gives other latencies.

    seeds: re-runs with predicted latencies and the commits of other seeds.
    """
    runs = (predicted, measured)
    logged = is_client(measured)  # it has no plans
    worlds = [world_of(predicted, policy, p_profile)]
    worlds.append(worlds[0] if logged else world_of(measured, policy, m_profile))
    requests = [run.requests(policy) for run in runs]
    steps, lists = [run.steps(policy) for run in runs], [run.step_lists(policy) for run in runs]
    model = p_profile.latency
    commits, ended = [], []
    for run, world, columns, its_steps, its_lists in zip(runs, worlds, requests, steps, lists, strict=True):
        seen = Commits(columns, world.policy, world.width)
        if logged and run is measured:
            ended.append(seen.learn(columns, its_lists, world.policy.block_length))
        else:
            ended.append(witness(world, run, columns, its_steps, its_lists, seen))
        commits.append(seen)
    _check_prices(predicted, worlds[0], steps[0], lists[0], requests[0], ended[0])
    recorded = Latencies(model, steps[1], lists[1], requests[1], worlds[0].policy, ended[1], logged)
    table = cache_overhead.table_of(model, worlds[0].policy.cache)
    price: list[Price] = [
        lambda plan, left=None, blocks=0: cache_overhead.price(model, table, plan, left) + model.host_block * blocks,
        recorded,
    ]  # fmt: skip
    total, done = (4 + seeds) * len(steps[1]["step"]), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None and done % 256 == 0:
            progress(done, max(total, done))

    cross: dict[tuple[int, int], Columns] = {}
    counts = np.zeros(4, np.int64)
    for c in (0, 1):
        for source in (0, 1):
            recorded.restart()
            before = commits[c].counts.copy()
            cross[source, c] = rerun(worlds[source], requests[1], price[source], commits[c].of, tick)
            if source != c:
                counts += commits[c].counts - before
    for i in range(1, seeds + 1):
        others = drawn(worlds[0], requests[1], (predicted.info.seed or 0) + i)
        cross[0, 1 + i] = rerun(worlds[0], requests[1], price[0], others, tick)
    profile = predicted.info.profiles.get(policy, predicted.info.profile)
    frontend = 0.0 if profile is None else profile.frontend
    inside = [requests[0] | {"arrival": requests[0]["arrival"] + frontend}, requests[1]]
    if logged:
        inside[1] = at_engine(measured, policy, requests[1])
    found = _parts(requests[0], requests[1], inside[0], inside[1], cross, index)
    return Parts(found, recorded.num_steps, recorded.num_nearest, *counts.tolist())


def per_request(requests: Columns, index: Indices) -> dict[str, Floats]:
    """Latency metrics (s); itl is the mean gap; NaN if not completed."""
    where = np.full(int(max(index.max(initial=-1), requests["request"].max(initial=-1))) + 1, -1)
    where[requests["request"]] = np.arange(len(requests["request"]))
    rows = where[index]
    columns = rows_of(requests, rows)
    done = (rows >= 0) & (columns["status"] == COMPLETED)
    return {name: np.where(done, values, np.nan) for name, values in latencies(columns).items()}


def at_engine(run: Run, policy: str, requests: Columns) -> Columns:
    """Request columns with the times in the engine's log."""
    names = ("scheduled", "first_emission", "last_emission")
    own = run.requests(policy, [f"engine_{name}" for name in names])
    times = {name: requests["arrival"] + own[f"engine_{name}"] for name in names}
    return requests | times | {"finish": times["last_emission"]}


def _parts(
    predicted: Columns, measured: Columns, p_inside: Columns, m_inside: Columns,
    cross: dict[tuple[int, int], Columns], index: Indices,
) -> dict[str, MetricParts]:  # fmt: skip
    """p_inside, m_inside: without the time outside the engine."""
    p, m = per_request(predicted, index), per_request(measured, index)
    p_engine, m_engine = per_request(p_inside, index), per_request(m_inside, index)
    x = {corner: per_request(columns, index) for corner, columns in cross.items()}
    found = {}
    for name in p:
        values = [p[name], m[name], p_engine[name], m_engine[name], *(corner[name] for corner in x.values())]
        known = ~np.isnan(values).any(axis=0)
        if not known.any():
            continue
        mean_p, mean_m = float(p[name][known].mean()), float(m[name][known].mean())
        in_p, in_m = float(p_engine[name][known].mean()), float(m_engine[name][known].mean())
        means = {corner: float(values[name][known].mean()) for corner, values in x.items()}
        pp, mp, pm, mm = (means[corner] for corner in ((0, 0), (1, 0), (0, 1), (1, 1)))
        seeds = [pp, *(mean for (_, commits), mean in means.items() if commits > 1)]
        found[name] = MetricParts(
            int(known.sum()),
            mean_m,
            mean_p - mean_m,
            latency=((pp - mp) + (pm - mm)) / 2,
            commits=((pp - pm) + (mp - mm)) / 2,
            scheduling=(in_p - pp) + (mm - in_m),
            frontend=(mean_p - in_p) - (mean_m - in_m),
            seed=float(np.std(seeds, ddof=1)) if len(seeds) > 1 else math.nan,
        )
    return found


def _check_prices(run: Run, world: World, steps: Columns, lists: Lists, requests: Columns, ended: Ints) -> None:
    """DsimError unless the profile's prices are the twin's latencies."""
    policy, profile = world.policy, world.profile
    priced = prices(profile.latency, steps, lists, requests, policy, ended)
    wrong = np.flatnonzero(~np.isclose(priced, steps["latency"], rtol=1e-9, atol=0))
    if len(wrong):
        i = wrong[0]
        raise DsimError(
            f"{run.folder}: step {int(steps['step'][i])} of {policy.name} took {steps['latency'][i]:.6g} s and profile "
            f"{profile.name} prices it at {priced[i]:.6g} s: give the profile that the run was made with, --profile "
            "FILE"
        )
