"""Compare plan, capacity and tune with brute force: `python benchmarks/brute_force.py -o runs/brute`.

Problems are small enough to try every neighbouring fleet and rate with other seeds. Prints the table of
benchmarks/brute_force.md; the same command continues in the folder.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.errors import DsimError
from dsim.planner.backend import Pool
from dsim.planner.capacity import CapacitySearch, capacity, search_of
from dsim.planner.contents import Json
from dsim.planner.memo import STORE, Memo
from dsim.planner.objective import Evaluator, Part
from dsim.planner.plan import candidates_of, plan
from dsim.planner.plan_replays import fleet
from dsim.planner.planned import Planned
from dsim.planner.pool_counts import severity_of
from dsim.planner.replicate import to_judge
from dsim.planner.space import Candidate, candidate_of, runs_on, space_of
from dsim.planner.tune import tune
from dsim.profiler.profile import load
from dsim.results.scenario import Scenario
from dsim.traces import load as load_trace
from dsim.traces import write

SEED = 1000  # of brute force; searches use 0
NUM = 16  # replications
SURE = 2.0  # standard errors within which a mean counts on both sides
REQUESTS = 2000
POLICIES = ("lmdeploy-bd32", "optimus")
CHUNKS = (4, 8, 16)
SPACE: Json = {"policy": ["lmdeploy-bd32", "optimus", "chunk"], "chunk": list(CHUNKS)}


@dataclass(frozen=True)
class Problem:
    """A question with few neighbours."""

    name: str
    trace: str
    rate: float  # req/s, plan
    busy: float  # req/s, tune: one replica of the default is too few, of some settings enough
    slos: tuple[str, ...]
    more: tuple[tuple[str, Any], ...] = ()  # of the scenario


PROBLEMS = (
    Problem("chat, both SLOs", "azure-conv", 12.0, 6.0, ("ttft=2s", "norm_latency=100ms")),
    Problem("chat, light", "azure-conv", 3.0, 6.0, ("ttft=2s",)),
    Problem("chat, p90 of the pace", "azure-conv", 12.0, 4.0, ("p90:tpot_chunk=100ms", "ttft=4s")),
    Problem("long prompts", "mooncake-conv", 2.0, 0.6, ("ttft=30s",)),
    Problem(
        "Poisson, equal answers", "azure-conv", 20.0, 12.0, ("norm_latency=120ms",),
        (("arrival", "poisson"), ("lengths", "fixed:256,128")),
    ),
    Problem(
        "bursts", "azure-conv", 10.0, 3.0, ("p99:ttft=3s", "norm_latency=150ms"), (("arrival", "gamma"), ("cv", 2.0))
    ),
)  # fmt: skip


class Kept:
    """Finished work by key, for a problem and a profile."""

    def __init__(self, folder: Path, problem: Problem) -> None:
        self._asked = {"problem": repr(problem), "profile": repr(load(Scenario.profile))}
        self._memo = Memo()
        self._memo.open(folder / STORE)

    def __call__(self, key: str, work: Callable[[], Any]) -> Any:
        return self._memo.replay(lambda: {**self._asked, "key": key}, work)


def severity(work: tuple[CapacitySearch, int, float]) -> float:
    search, index, rate = work
    return severity_of(search.requests(index, Memo())(rate))


def mean_severity(pool: Pool, search: CapacitySearch, rate: float) -> tuple[float, float]:
    """Over replications of another seed; standard error."""
    other = replace(search, scenario=replace(search.scenario, seed=SEED))
    values = np.array(list(pool.map(severity, [(other, i, rate) for i in range(NUM)])))
    return float(values.mean()), float(values.std(ddof=1)) / NUM**0.5


def holds(found: Sequence[float]) -> bool:
    """The SLOs may be met."""
    return found[0] - SURE * found[1] <= 0


def breaks(found: Sequence[float]) -> bool:
    """An SLO may be missed."""
    return found[0] + SURE * found[1] >= 0


def of_plan(kept: Kept, problem: Problem, scenario: Scenario, pool: Pool, jobs: int) -> list[str]:
    """Its fleets, one replica fewer and more, and the headroom's ends."""
    num = to_judge(len(scenario.source()))

    def answer() -> Json:
        candidates, out = candidates_of(scenario, POLICIES, [load(scenario.profile)], lambda _: 2.0)
        found: Planned = plan(scenario, candidates, out, rate=problem.rate, num_requests=num, jobs=jobs)
        return found.to_json()

    planned = kept(f"plan {problem.name}", answer)
    lines = []
    for row in planned["ranking"]:
        search = search_of(replace(scenario, policy=row["policy"]), 0.02, 0.99, num)

        def at(replicas: int, rate: float, search: CapacitySearch = search) -> Any:
            key = f"plan {problem.name} {search.policy} {replicas} {rate:.6g}"
            return kept(key, lambda: mean_severity(pool, fleet(search, replicas), rate))

        k, room = row["replicas"], row["headroom"]
        enough = holds(at(k, problem.rate))
        fewer = k > 1 and not breaks(at(k - 1, problem.rate))
        more = holds(at(k + 1, problem.rate))
        verdict = "right" if enough and more and not fewer else "one fewer would do" if enough else "WRONG"
        low, high = (at(k, problem.rate * (1 + room[end])) for end in ("low", "high"))
        ends = "holds, breaks" if holds(low) and breaks(high) else "WRONG" if not holds(low) else "holds at both"
        said = f"{k} × `{row['policy']}`, headroom {100 * room['low']:.1f} to {100 * room['high']:.1f} %"
        lines.append(f"| {problem.name} | plan | {said} | fleet {verdict}; ends of the headroom: {ends} |")
    return lines


def rate_of(scenario: Scenario, num: int, jobs: int) -> Json:
    return asdict(capacity(scenario, precision=0.05, num_requests=num, jobs=jobs, curve=False).rate)


def of_capacity(kept: Kept, problem: Problem, scenario: Scenario, pool: Pool, jobs: int) -> list[str]:
    """SLOs hold at the low end and 5 % below, and break at the high end and 5 % above."""
    num = to_judge(len(scenario.source()))
    lines = []
    for policy in POLICIES:
        own = replace(scenario, policy=policy)
        found = kept(
            f"capacity {problem.name} {policy}",
            partial(rate_of, own, num, jobs),
        )
        search = search_of(own, 0.05, 0.99, num)

        def at(rate: float, search: CapacitySearch = search) -> Any:
            key = f"capacity {problem.name} {search.policy} {rate:.6g}"
            return kept(key, lambda: mean_severity(pool, search, rate))

        below = all(holds(at(rate)) for rate in (0.95 * found["low"], found["low"]))
        above = all(breaks(at(rate)) for rate in (found["high"], 1.05 * found["high"]))
        verdict = "holds below, breaks above" if below and above else "WRONG: " + ("too low" if below else "too high")
        said = f"`{policy}`: {found['value']:.3g} req/s ({found['low']:.3g} to {found['high']:.3g})"
        lines.append(f"| {problem.name} | capacity | {said} | {verdict} |")
    return lines


def goodput(work: tuple[Evaluator, Candidate, int]) -> float:
    evaluator, candidate, index = work
    return evaluator(candidate, Part("confirm", index)).values[0]


def listed(pool: Pool, work: Sequence[tuple[Evaluator, Candidate, int]]) -> list[float]:
    return list(pool.map(goodput, work))


def of_tune(kept: Kept, problem: Problem, scenario: Scenario, pool: Pool, jobs: int) -> list[str]:
    """The recommended setting among all of the space, on held-out traffic of another seed."""
    own = replace(scenario, rate=problem.busy)

    def answer() -> Json:
        check = runs_on(own.loaded_profile(), own.workload)
        space = space_of(SPACE, "space", check)
        return tune(own, space=space, trials=8, jobs=jobs).to_json()

    found = kept(f"tune {problem.name}", answer)
    every = ["lmdeploy-bd32", "optimus", *(f"chunk,chunk={n}" for n in CHUNKS)]
    specs = list(dict.fromkeys([found["recommended"]["policy"], found["default"]["policy"], *every]))
    evaluator = Evaluator(replace(own, seed=SEED), ("goodput",), None)
    values = {}
    for spec in specs:
        candidate = candidate_of(spec, 1)
        work = [(evaluator, candidate, i) for i in range(NUM)]
        values[spec] = np.array(kept(f"tune {problem.name} {spec}", partial(listed, pool, work)))
    chosen, base = values[found["recommended"]["policy"]], values[found["default"]["policy"]]
    best = max(values, key=lambda spec: float(values[spec].mean()))
    short = 1 - float(chosen.mean()) / float(values[best].mean())
    gap = values[best] - chosen
    sure = float(gap.mean()) - SURE * float(gap.std(ddof=1)) / NUM**0.5 > 0
    gain = float(chosen.mean()) / float(base.mean()) - 1
    told = found["winner"]["gains"]["goodput"]
    said = f"`{found['recommended']['policy']}`, gain {100 * told['value']:+.1f} % ({100 * told['low']:+.1f} to "
    said += f"{100 * told['high']:+.1f})"
    error = float((chosen / base).std(ddof=1)) / NUM**0.5
    inside = told["low"] - SURE * error <= gain <= told["high"] + SURE * error or not found["confirmed"]
    verdict = "the best" if not sure else f"`{best}` is {100 * short:.1f} % better"
    lines = f"of {len(values)} settings {verdict}; gain {100 * gain:+.1f} %" + ("" if inside else ", OUTSIDE")
    return [f"| {problem.name} | tune | {said} | {lines} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/brute"))
    parser.add_argument("--only", type=int, action="append", help="the number of a problem, from 1; may be given again")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = []
    with Pool("local", given.jobs, None) as pool:
        for number in given.only or range(1, len(PROBLEMS) + 1):
            problem = PROBLEMS[number - 1]
            kept = Kept(given.out, problem)
            path = given.out / f"{problem.trace}.jsonl"
            if not path.is_file():
                write(load_trace(problem.trace).head(REQUESTS), path)
            scenario = Scenario(str(path), slos=problem.slos, **dict(problem.more))
            for part in (of_plan, of_capacity, of_tune):
                try:
                    lines += part(kept, problem, scenario, pool, given.jobs)
                except DsimError as error:  # no answer, as where no setting meets the bounds
                    lines.append(f"| {problem.name} | {part.__name__.removeprefix('of_')} | none: {error} | |")
    print("\n| problem | command | answer | brute force |\n|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
