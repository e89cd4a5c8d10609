"""Policies in the twin, next to vLLM: `python -m dsim.benchmarks.policy_in_vllm.policies_table OUT=KIND ...`

OUT: record_policies.py's folder, whose log has been split by runs. The twin schedules the log's requests with
the time of each of the log's steps in turn, and ends a canvas after as many steps as its request and the policy allow.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.benchmarks.policy_in_vllm.record_policies import POLICIES, spec_of
from dsim.benchmarks.vllm_diffusion.plans import Log
from dsim.engine.allowed_code import allowed
from dsim.engine.discipline import EMPTY_STEP
from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import named_files, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan

Floats = npt.NDArray[np.float64]
NO_CAP = 2**30
MOMENT = 0.01  # s


@dataclass(frozen=True)
class Replayed:
    num_alike: int  # steps of the same rows, in order, with the same tokens and keys
    num_steps: int  # of the log
    first_other: str  # the first step that is planned otherwise, or empty
    latency: Floats  # s, of each request
    measured: Floats


def replayed(log: Log, spec: str) -> Replayed:
    """The log's requests under the log's policy and this discipline."""
    policy = replace(log.setting.policy, discipline=parse(spec, allowed(named_files(spec))).discipline)
    table = RequestTable(len(log.requests))
    engine = replace(log.setting, policy=policy).engine(table)
    arrival = np.array([line["arrival"] for line in log.requests])
    canvases = Canvases([line.get("diffusion_max_steps") or NO_CAP for line in log.requests])
    known, clock, number, num_alike, first_other = log.known(), float(arrival[0]), 0, 0, ""
    while engine.num_completed < len(arrival) or not engine.idle:  # the last step may compute ended requests
        coming = int(np.searchsorted(arrival, clock, side="right"))
        if not first_other and number < len(log.steps):  # vLLM decides a moment after a step's end
            coming = known[number]
            if engine.idle:
                coming = min(coming, int(np.searchsorted(arrival, clock + MOMENT, side="right")))
            elif log.ahead[number + 1]:
                coming = known[number + 1]
        for request in range(engine.submitted, coming):
            engine.submit(request_of(request, log.requests[request]))
        plan = engine.schedule(clock)
        if plan is None:
            clock += EMPTY_STEP
            if not engine.withheld:
                clock = float(arrival[engine.submitted])
            continue
        if number < len(log.steps):
            rows = list(zip(*(x.tolist() for x in (plan.requests, plan.num_tokens, plan.num_keys)), strict=True))
            logged = [(row["requests"], row["row_tokens"], row["row_keys"]) for row in log.rows[number]]
            num_alike += rows == logged
            if rows != logged and not first_other:
                first_other = f"step {number}: rows {rows}, vLLM {logged}"
        latency = log.steps[min(number, len(log.steps) - 1)]["latency"]
        engine.commit(StepOutcome(latency, canvases.committed(engine, plan)), clock + latency)
        clock, number = clock + latency, number + 1
    finish = np.array([log.finish[i] for i in range(len(arrival))])
    return Replayed(num_alike, len(log.steps), first_other, table["finish"] - arrival, finish - arrival)


class Canvases:
    """Steps of the canvases in flight. limits: of each request's canvases."""

    def __init__(self, limits: list[int]) -> None:
        self._draws: Any = SimpleNamespace(requests={"most": np.array(limits)})
        self._num_steps: Counter[int] = Counter()

    def committed(self, engine: Engine, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """What the step in flight commits: next tokens, and canvases at their last step."""
        if engine.policy.rows.commits == "tokens":
            return plan.window.copy()
        engine.caps.apply(self._draws)
        committed = np.zeros(plan.window.shape, np.bool_)
        for row, (request, phase) in enumerate(zip(plan.requests.tolist(), plan.phases.tolist(), strict=True)):
            if phase == Phase.PREFILL:  # a preempted request begins its canvas again
                self._num_steps[request] = 0
            if phase == Phase.DENOISE:
                self._num_steps[request] += 1
                if self._num_steps[request] >= self._draws.requests["most"][request]:
                    committed[row], self._num_steps[request] = plan.window[row], 0
        return committed


def request_of(index: int, line: Mapping[str, Any]) -> Request:
    length = line["output_length"]
    return Request(
        index=index,
        arrival=line["arrival"],
        input_length=line["input_length"],
        output_length=length,
        max_tokens=length,
        estimate=line.get("estimated_length", 0),
        deadline=line.get("deadline", np.inf),
    )


def main() -> None:
    print("| engine | policy | mean e2el by load: vLLM, s | the twin, s | worst error | steps planned alike |")
    print("|---|---|---|---|---|---|")
    ranks: dict[str, list[bool]] = defaultdict(list)
    for out, _, kind in (argument.partition("=") for argument in sys.argv[1:]):
        means: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        for policy in POLICIES:
            paths = sorted(Path(out).glob(f"{policy}-*.steps.jsonl"), key=rate_of)
            runs = [replayed(log, spec_of(policy, log.spec.partition(",")[0])) for log in map(Log, paths)]
            if not runs:
                continue
            pairs = [(run.measured.mean(), run.latency.mean()) for run in runs]
            for path, (measured, twin) in zip(paths, pairs, strict=True):
                means[f"{rate_of(path):g}"].append((policy, float(measured), float(twin)))
            worst = max(abs(twin / measured - 1) for measured, twin in pairs)
            columns = (", ".join(f"{pair[i]:.3f}" for pair in pairs) for i in (0, 1))
            steps = f"{sum(run.num_alike for run in runs)}/{sum(run.num_steps for run in runs)}"
            print(f"| {kind} | {policy} | {' | '.join(columns)} | {100 * worst:.2f} % | {steps} |", flush=True)
            for run, path in zip(runs, paths, strict=True):
                if run.first_other:
                    print(f"  {path.name}: {run.first_other}", file=sys.stderr)
        for rows in means.values():
            measured, twin = ([name for name, *_ in sorted(rows, key=lambda row: row[i])] for i in (1, 2))
            ranks[kind].append(measured == twin)
    for kind, same in ranks.items():
        print(f"{kind}: its policies ranked as measured at {sum(same)} of {len(same)} loads", file=sys.stderr)


def rate_of(path: Path) -> float:
    match = re.search(r"-([\d.]+)\.steps", path.name)
    assert match is not None
    return float(match[1])


if __name__ == "__main__":
    main()
