"""Compare plan, tune and follow with brute force on ten problems: `python benchmarks/brute_force.py -o runs/brute`.

Each problem has a trace made here, a shipped profile, SLOs, and a preset of the profile's engine. Every setting of the
preset, one replica less and the ends of the headroom are replayed on the whole trace with seeds that no search used.
Prints the tables of benchmarks/brute_force.md; the same command continues in the folder.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.errors import DsimError
from dsim.engine.spec import parse, settings_of
from dsim.following.outlook import advice, capacity, what_ifs
from dsim.planner.backend import Pool
from dsim.planner.candidate import beyond_tested, plain_spec, spelt
from dsim.planner.candidates import PlanCandidate, candidates_of
from dsim.planner.capacity import CapacitySearch, search_of
from dsim.planner.contents import Json
from dsim.planner.crossing import find
from dsim.planner.memo import STORE, Memo
from dsim.planner.plan import plan
from dsim.planner.plan_replays import fleet
from dsim.planner.plan_result import Planned
from dsim.planner.pool_counts import severity_of
from dsim.planner.race import LIMIT
from dsim.planner.replicate import measure, to_judge
from dsim.planner.settings import GAIN, NEAR, UNTESTED
from dsim.planner.tune import tune
from dsim.profiler.profile import load
from dsim.results.world import World
from dsim.traces import Trace, synth, write

SEED = 1000  # of brute force; searches use 0
NUM = 8  # replications
SURE = 2.0  # standard errors
ROUTER = "random"  # plan's own
DAYS, SWING = 2, 0.6  # of the diurnal trace; swing about the mean rate
DOCUMENTS = 0.1  # share of long prompts in a mix
STRETCH, QUIET = 60, 3.0  # requests of an on-off stretch; gaps in a quiet one, by those in a busy one
WIDTH, SHARPNESS = 0.05, 0.02  # of a setting's capacity, in log rate

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Traffic, GPUs, SLOs, and one preset of an engine."""

    name: str
    num: int  # requests
    arrival: str
    lengths: str
    profile: str
    policy: str
    slos: tuple[str, ...]
    rate: float  # req/s: about four times what a replica serves under the engine's defaults
    attainment: float = 0.99
    shape: str = ""  # day, documents or on-off

    def trace(self, seed: int) -> Trace:
        made = synth(self.arrival, 1.0, lengths=self.lengths, num_requests=self.num, seed=seed)
        if self.shape == "documents":
            long = synth(self.arrival, 1.0, lengths="longbench", num_requests=self.num, seed=seed + 1)
            is_long = np.random.default_rng(seed).random(self.num) < DOCUMENTS
            return replace(
                made,
                input_length=np.where(is_long, long.input_length, made.input_length),
                output_length=np.where(is_long, long.output_length, made.output_length),
            )
        if self.shape == "on-off":
            is_quiet = np.arange(self.num) // STRETCH % 2 == 1
            gaps = np.diff(made.arrival, prepend=0.0)
            return replace(made, arrival=np.cumsum(np.where(is_quiet, QUIET * gaps, gaps)))
        if self.shape == "day":
            time = np.linspace(0.0, made.duration, 4097)
            a_day = made.duration / (2 * np.pi * DAYS)
            come = time - SWING * a_day * np.sin(time / a_day)
            return replace(made, arrival=np.interp(made.arrival - made.arrival[0], come, time))
        return made


PROBLEMS = (
    Problem(
        "chat", 2000, "poisson", "sharegpt", "h100-sdar-8b/lmdeploy", "lmdeploy-0.18",
        ("ttft=1s", "norm_latency=20ms"), 24.0,
    ),
    Problem(
        "long prompts", 1500, "gamma,cv=1.5", "lognormal:6000,4000,300,200", "h100-diffusiongemma-fp8",
        "vllm-diffusion", ("ttft=5s",), 10.0, 0.95,
    ),
    Problem(
        "short answers", 2500, "poisson", "lognormal:800,600,40,30", "h200x2-diffusiongemma/sglang", "sglang-gemma",
        ("e2el=6s",), 18.0,
    ),
    Problem(
        "bursts", 2000, "gamma,cv=3", "sharegpt", "h200x2-diffusiongemma/vllm", "vllm-diffusion",
        ("ttft=4s", "norm_latency=50ms"), 5.0, 0.95,
    ),
    Problem(
        "equal answers", 2000, "poisson", "fixed:512,256", "h100-llada2.1-mini/sglang", "sglang-joint",
        ("norm_latency=15ms",), 40.0,
    ),
    Problem(
        "two days", 2400, "poisson", "lmsys", "a100-sdar-8b/graphs", "lmdeploy-0.18",
        ("ttft=2s", "norm_latency=30ms"), 12.0, 0.95, shape="day",
    ),
    Problem(
        "maths", 2000, "gamma,cv=2", "gsm8k", "h100-sdar-8b/sglang", "sglang-fdfo",
        ("p90:tpot_chunk=20ms",), 20.0,
    ),
    Problem(
        "chat and documents", 1800, "poisson", "lmsys", "a100-sdar-8b", "lmdeploy-bd32",
        ("p99:ttft=4s", "norm_latency=100ms"), 12.0, 0.95, shape="documents",
    ),
    Problem(
        "code, even gaps", 2000, "constant", "lognormal:1500,1000,150,100", "h100-qwen3-8b-ar", "vllm-ar",
        ("ttft=1s", "tpot_chunk=30ms"), 60.0,
    ),
    Problem(
        "on and off", 2000, "poisson", "ifeval", "h20-llada2.1-mini-sglang", "sglang-joint",
        ("95%:ttft=3s", "e2el=20s"), 30.0, 0.95, shape="on-off",
    ),
)  # fmt: skip


class Bench:
    """A problem's work, each piece done once."""

    def __init__(self, folder: Path, number: int) -> None:
        self.problem = own = PROBLEMS[number - 1]
        self.folder = folder / str(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "trace.jsonl"
        if not file.is_file():
            write(own.trace(number), file)
        self.world = World(str(file), policy=own.policy, profile=own.profile, slos=own.slos, router=ROUTER)
        self.requests = self.world.source()
        self.num = to_judge(len(self.requests))
        self._memo = Memo()
        self._memo.open(self.folder / STORE)
        self._asked = {"problem": repr(own), "profile": repr(load(own.profile))}

    def kept(self, key: str, work: Callable[[], Any]) -> Any:
        [answer] = self._memo.map(Pool(jobs=1), lambda _: work(), [key], lambda key: {**self._asked, "key": key})
        return answer

    def candidates(self) -> list[PlanCandidate]:
        return candidates_of(self.world, [self.problem.policy], [load(self.problem.profile)], lambda _: None)[0]

    def planned(self) -> Json:
        def answer() -> Json:
            found: Planned = plan(
                self.world, self.candidates(), rate=self.problem.rate, attainment=self.problem.attainment,
                num_requests=self.num, jobs=1,
            )  # fmt: skip
            return found.to_json()

        asked: Json = self.kept("plan", answer)
        return asked

    def tuned(self, replicas: int, specs: Sequence[str]) -> Json:
        """The same settings on the planned fleet; the first is the one to beat."""

        def answer() -> Json:
            own, preset = replace(self.world, rate=self.problem.rate, replicas=replicas), self.problem.policy
            space = {"policy": [preset], preset: fields_of(specs)}
            return tune(own, space=space, trials=len(specs), policy=specs[0]).to_json()

        asked: Json = self.kept(f"tune {replicas}", answer)
        return asked

    def followed(self, spec: str, replicas: int) -> Json:
        """What follow advises to a fleet that serves the trace, as its follower asks."""

        def answer() -> Json:
            target, rate = self.problem.attainment, self.problem.rate
            own = replace(self.world, policy=spec, replicas=replicas)
            requests = self.requests.scaled_to_rate(rate)
            outcomes = what_ifs(own, requests, replicas)
            room = capacity(own, requests, rate, target)
            said = advice(outcomes, room, rate, target, {})
            return {"action": said.action, "room": room}

        asked: Json = self.kept(f"follow {spec} {replicas}", answer)
        return asked

    def search(self, spec: str, replicas: int) -> CapacitySearch:
        own = replace(self.world, policy=spec, seed=SEED)
        return fleet(search_of(own, 0.02, self.problem.attainment, self.num), replicas)

    def severities(self, spec: str, replicas: int, rate: float) -> Floats:
        """By replication; below 0 the SLOs are met."""
        search = self.search(spec, replicas)

        def work() -> list[float]:
            return [severity_of(search.requests(index)(rate)) for index in range(NUM)]

        return np.array(self.kept(f"severities {spec} {replicas} {rate:.6g}", work))

    def capacities(self, spec: str, replicas: int) -> Floats:
        """By replication, req/s."""
        search = self.search(spec, replicas)

        def own(index: int) -> float:
            ask = search.requests(index)
            return find(ask, search.criteria, self.problem.rate, WIDTH, SHARPNESS).rate

        return np.array(self.kept(f"capacities {spec} {replicas}", lambda: [own(index) for index in range(NUM)]))

    def in_order(self, spec: str, replicas: int) -> tuple[Floats, Floats]:
        """Of the trace in its own order, by seed: severities, and shares of requests within their targets.

        DsimError if the setting does not fit the memory, or a request never fits.
        """
        own = replace(self.world, policy=spec, replicas=replicas, seed=SEED)
        search = search_of(own, 0.02, self.problem.attainment, self.num)

        def replay(seed: int) -> tuple[float, float]:
            seeded, requests = replace(own, seed=seed), self.requests.scaled_to_rate(1.0)
            reading = measure(seeded, search.criteria, requests, self.problem.rate)[0]
            if reading.rejected:
                raise DsimError(f"{spec}: {reading.rejected:.2%} of requests never fit")
            summary = seeded.run(requests.scaled_to_rate(self.problem.rate))
            return severity_of(reading), 1.0 if summary.slo_attainment is None else summary.slo_attainment

        def work() -> list[tuple[float, float]]:
            own.check_fits()
            return [replay(SEED + k) for k in range(NUM)]

        severities, shares = np.array(self.kept(f"in order {spec} {replicas}", work)).T
        return severities, shares


def fields_of(specs: Sequence[str]) -> dict[str, list[Any]]:
    """The values of the fields in which settings differ, in order; none, which is no limit, is the last."""
    values: dict[str, dict[str, Any]] = {}
    for spec in specs:
        for name, value in settings_of(parse(spec)).items():
            values.setdefault(name, {})[spelt(value)] = "none" if value is None else value
    return {name: sorted(own.values(), key=_order) for name, own in values.items() if len(own) > 1}


def _order(value: Any) -> float:
    return math.inf if value == "none" else float(value)


def neighbours(spec: str, specs: Sequence[str]) -> list[str]:
    """Settings that differ in one field by one value."""
    fields, at = fields_of(specs), settings_of(parse(spec))
    found = []
    for other in specs:
        own = settings_of(parse(other))
        moves = [abs(v.index(_plain(own[n])) - v.index(_plain(at[n]))) for n, v in fields.items()]
        if sum(moves) == 1:
            found.append(other)
    return found


def _plain(value: Any) -> Any:
    return "none" if value is None else value


def sure(gaps: Floats) -> bool:
    """Whether the mean is above 0 by more than SURE standard errors."""
    return float(gaps.mean()) > SURE * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def within(values: Floats) -> str:
    """The mean, and SURE standard errors."""
    return f"{values.mean():+.2f} ± {SURE * float(values.std(ddof=1)) / math.sqrt(len(values)):.2f}"


def weight(spec: str) -> float:
    """The factor that a setting's rate must have to count as much as a tested one's."""
    return UNTESTED if beyond_tested(spec) else 1.0


def better(bench: Bench, spec: str, others: Sequence[str], replicas: int, rate: float) -> list[str]:
    """Settings that surely serve more than a tie allows. rate: req/s, near the setting's capacity."""
    tie = GAIN if spec == bench.problem.policy else NEAR
    base = bench.severities(spec, replicas, rate)
    found = []
    for other in others:
        factor = tie * weight(other) / weight(spec)
        if sure(base - bench.severities(other, replicas, rate * factor)):
            found.append(other)
    return found


def shown(spec: str) -> str:
    _, *fields = spec.split(",")
    return f"`{','.join(fields)}`" if fields else "the default"


def of_tune(bench: Bench, spec: str, other: str, replicas: int) -> str:
    """Whether tune's setting is plan's, or as good to tune: by the share of requests within their targets."""
    if other == spec:
        return "the same"
    (_, mine), (severities, theirs) = bench.in_order(spec, replicas), bench.in_order(other, replicas)
    gain = float(theirs.mean() / mine.mean()) - 1
    tie = (UNTESTED if weight(spec) != weight(other) else NEAR) - 1
    meets = "surely meets" if sure(-severities) else "surely misses" if sure(severities) else "may miss"
    said = "tied" if abs(gain) <= tie else "NOT TIED"
    return f"{shown(other)}: {said}, {100 * gain:+.1f} % goodput; {meets} the SLOs on {replicas}"


def of_follow(bench: Bench, spec: str, replicas: int) -> str:
    """Its advice to the planned fleet and to one replica less, and its capacity."""
    said = bench.followed(spec, replicas)
    room = said["room"]
    takes = "no capacity" if room is None else f"{room:.3g} req/s"
    fewer = f"; on {replicas - 1}: {bench.followed(spec, replicas - 1)['action']}" if replicas > 1 else ""
    return f"{said['action']} ({takes}){fewer}"


def of_settings(bench: Bench, spec: str, specs: Sequence[str], replicas: int, rate: float) -> str:
    """The other settings that need fewer replicas, or serve more than a tie allows."""
    others, near = [one for one in specs if one != spec], neighbours(spec, specs)
    cheaper = [
        one for one in others if replicas > 1
        and sure(-bench.severities(one, replicas - 1, bench.problem.rate * max(1.0, weight(one) / weight(spec))))
    ]  # fmt: skip
    found = better(bench, spec, others, replicas, rate)
    said = f"of {len(others)}, {len(near)} of them neighbours: "
    said += f"FEWER REPLICAS for {', '.join(map(shown, cheaper))}, " if cheaper else "none needs fewer, "
    if not found:
        return said + "none serves more"
    more = []
    for one in found:
        ratio = np.log(bench.capacities(one, replicas) / bench.capacities(spec, replicas))
        error = SURE * float(ratio.std(ddof=1)) / math.sqrt(NUM)
        more.append((float(ratio.mean()), f"{shown(one)} by {100 * ratio.mean():.1f} ± {100 * error:.1f} %"))
    return f"{said}{len(found)} ({len({*near} & {*found})} neighbours) serve more, {max(more)[1]}"


def row(bench: Bench) -> str:
    problem, planned = bench.problem, bench.planned()["ranking"][0]
    [candidate] = bench.candidates()
    specs = list(dict.fromkeys(plain_spec(one) for one in candidate.settings))
    spec, k, room = plain_spec(planned["policy"]), planned["replicas"], planned["headroom"]
    search = bench.tuned(k, specs)
    recommended = search["winner" if search["confirmed"] else "default"]
    tuned = plain_spec(recommended["policy"])
    at = bench.severities(spec, k, problem.rate)
    less = np.ones(NUM) if k == 1 else bench.severities(spec, k - 1, problem.rate)
    enough = "right" if at.mean() <= 0 else "TOO SMALL" if sure(at) else "UNSURE"
    if sure(-less):
        enough = "ONE FEWER WOULD DO"
    growing = int((at >= LIMIT).sum())
    low, high = (bench.severities(spec, k, problem.rate * (1 + room[end])) for end in ("low", "high"))
    ends = f"low end {'BREAKS' if sure(low) else 'holds'}, high end {'HOLDS' if sure(-high) else 'breaks'}"
    own, _ = bench.in_order(spec, k)
    cells = (
        problem.name,
        f"{k} × {shown(spec)}, {100 * room['low']:.1f} to {100 * room['high']:.1f} %",
        of_tune(bench, spec, tuned, k),
        of_follow(bench, spec, k),
        f"fits; {(own <= 0).sum()} of {NUM} seeds meet",
        f"{enough}: {within(at)}{f' ({growing} of {NUM} as a growing queue)' if growing else ''}"
        f"{f', on {k - 1} {within(less)}' if k > 1 else ''}; {ends}",
        of_settings(bench, spec, specs, k, problem.rate * (1 + room["value"])),
    )
    return f"| {' | '.join(cells)} |"


def asked(problem: Problem) -> str:
    shape = {"": "", "day": "two days, ", "documents": "a tenth longbench, ", "on-off": "on and off, "}[problem.shape]
    gaps = problem.arrival
    slos = ", ".join(f"`{slo}`" for slo in problem.slos)
    return (
        f"| {problem.name} | {problem.num:,} requests, {gaps}, {shape}`{problem.lengths}` | `{problem.profile}` | "
        f"`{problem.policy}` | {slos} | "
        f"{100 * problem.attainment:g} % | {problem.rate:g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/brute"))
    parser.add_argument("--only", type=int, action="append", help="the number of a problem, from 1; may be given again")
    given = parser.parse_args()
    numbers = given.only or range(1, len(PROBLEMS) + 1)
    print("| problem | trace | profile | preset | SLOs | share | req/s |\n|---|---|---|---|---|---|---|")
    print("\n".join(asked(PROBLEMS[number - 1]) for number in numbers))
    print("\n| problem | plan | tune | follow | replay | fleet and headroom | other settings |")
    print("|---|---|---|---|---|---|---|")
    for number in numbers:
        try:
            print(row(Bench(given.out, number)), flush=True)
        except DsimError as error:  # no answer, as where no fleet meets the bounds
            print(f"| {PROBLEMS[number - 1].name} | none: {error} | | | | | |", flush=True)


if __name__ == "__main__":
    main()
