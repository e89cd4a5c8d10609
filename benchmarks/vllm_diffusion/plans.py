"""The plans of dsim's preset next to vLLM's own: `python -m dsim.benchmarks.vllm_diffusion.plans LOG ...`

dsim's engine schedules each step of a hook's log. From the log it receives the requests that the scheduler knew, the
finished canvases, the ended requests, and when each step ended. Compared are a step's rows in order, with their tokens
and keys; the step's sums; and the numbers of waiting and running requests and of held pages.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import Phase, StepOutcome, StepPlan, reached
from dsim.profiler.steplog import policy_of, profile_of_log, read_log
from dsim.sim.setting import Setting
from dsim.traces import Trace
from dsim.traces.prefixes import prefixes_of

SAME_TIME = 1e-6  # s
SUMS = ("tokens", "sum_q_kv", "sum_kv", "prefill_tokens", "head_rows", "sampled_rows")
STATE = ("waiting", "running", "pages")


class Log:
    """A log's requests, by arrival, and its steps with their rows."""

    def __init__(self, path: Path) -> None:
        read = read_log(path)
        self.spec = policy_of(read.header)[0]
        self.started: float = read.header.started or 0.0  # s since 1970
        self.setting = Setting(parse(self.spec), profile_of_log(read, "logged", path.name))
        self.is_async = self.setting.policy.batching.hides_host
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        self.requests = sorted((x for x in lines if x["kind"] == "request"), key=lambda x: (x["arrival"], x["request"]))
        self.steps = [x for x in lines if x["kind"] == "step"]
        index = {x["request"]: i for i, x in enumerate(self.requests)}
        self.finish = {index[x["request"]]: x["time"] for x in lines if x["kind"] == "finish"}
        self.rows = [[{**row, "requests": index[row["requests"]]} for row in rows_of(step)] for step in self.steps]
        self.emitted: Counter[int] = Counter()
        for row in (row for rows in self.rows for row in rows):
            self.emitted[row["requests"]] += row["emitted"]
        self.last_steps = set(self._last_steps())
        # Asynchronous scheduling decides a step while the previous one runs, if there is one.
        self.ahead = [False, *(
            self.is_async and abs(a["start"] + a["latency"] - b["start"]) < SAME_TIME
            for a, b in zip(self.steps, self.steps[1:], strict=False)
        ), False]  # fmt: skip

    def _last_steps(self) -> Iterator[tuple[int, int]]:
        """Each canvas's last denoising step: the step's number, and the request."""
        last: dict[int, int] = {}
        for number, rows in enumerate(self.rows):
            for row in rows:
                if row["phases"] == "denoise":
                    last[row["requests"]] = number
                elif row["phases"] == "flush" and row["requests"] in last:
                    yield last.pop(row["requests"]), row["requests"]

    def known(self) -> list[int]:
        """Requests that the scheduler had received when it decided each step, ended ones included."""
        ends = np.sort(list(self.finish.values()))
        decided = [self.steps[i - self.ahead[i]]["start"] for i in range(len(self.steps))]
        over = np.searchsorted(ends, np.array(decided) + SAME_TIME, side="right").tolist()
        return [step["waiting"] + step["running"] + n for step, n in zip(self.steps, over, strict=True)]


def rows_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A step's rows; the hook writes one value if all rows have the same."""
    names = ("requests", "phases", "row_tokens", "row_keys", "emitted")
    columns = [step[name] if isinstance(step[name], list) else [step[name]] * step["batch"] for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def differences(log: Log, trace: Trace | None = None) -> list[str]:
    """A line for each step that dsim plans differently, up to the first with other rows."""
    return planned(log, trace)[1]


def planned(log: Log, trace: Trace | None = None) -> tuple[int, list[str]]:
    """The number of steps up to the first with other rows, and a line for each that dsim plans differently.

    trace: the log's requests, with their beginnings, if the engine caches prefixes.
    """
    table = RequestTable(len(log.requests))
    engine = log.setting.engine(table, eos=True, prefixes=None if trace is None else prefixes_of(trace))
    known, found = log.known(), []
    for i, (step, rows) in enumerate(zip(log.steps, log.rows, strict=True)):
        # As dsim begins a step it decides the next one, too, where vLLM does.
        decided = i + (log.ahead[i + 1] and not engine.idle)
        for request in range(engine.submitted, min(known[decided], len(log.requests))):
            submit(engine, request, log.requests[request])
        plan = engine.schedule(step["start"])
        if plan is None:
            return i, [*found, f"step {step['step']}: no rows, vLLM has {len(rows)}"]
        ours = list(zip(*(x.tolist() for x in (plan.requests, plan.num_tokens, plan.num_keys)), strict=True))
        theirs = [(row["requests"], row["row_tokens"], row["row_keys"]) for row in rows]
        if ours != theirs:
            return i, [*found, f"step {step['step']}: rows {ours}, vLLM {theirs}"]
        figures = [(name, getattr(plan.features, name), step[name]) for name in SUMS]
        # The hook looks at the scheduler when a step is decided, dsim when it begins.
        if not log.is_async or log.ahead[i + 1]:
            figures += [(name, getattr(plan, name), log.steps[i + log.is_async][name]) for name in STATE]
        wrong = [f"{name} {ours}, vLLM {theirs}" for name, ours, theirs in figures if ours != theirs]
        if wrong:
            found.append(f"step {step['step']}: {'; '.join(wrong)}")
        engine.commit(outcome(log, i, plan), step["start"] + step["latency"])
    return len(log.steps), found


def submit(engine: Engine, i: int, line: dict[str, Any]) -> None:
    limit = line["output_length"]
    engine.submit(Request(i, line["arrival"], line["input_length"], limit, max_tokens=limit))


def outcome(log: Log, number: int, plan: StepPlan) -> StepOutcome:
    """A step's outcome by the log: finished canvases, and ended requests."""
    committed = np.zeros(plan.window.shape, np.bool_)
    for row, request in enumerate(plan.requests.tolist()):
        if plan.phases[row] == Phase.DENOISE and (number, request) in log.last_steps:
            committed[row] = plan.window[row]
    answer = np.array([log.emitted[i] if i in log.finish else 2**30 for i in plan.requests.tolist()])
    at = plan.prompt + answer
    # The scheduler sees an EOS when the canvas's tokens are emitted.
    found = (reached(log.setting.policy, plan, committed) >= at) & (plan.phases == Phase.FLUSH)
    ends = np.where(found, np.minimum(plan.end, at), plan.end).astype(np.int32)
    return StepOutcome(log.steps[number]["latency"], committed, ends=ends)


def main() -> None:
    for name in sys.argv[1:]:
        log = Log(Path(name))
        found = differences(log)
        print(f"{name}: {len(log.steps)} steps, {len(found)} planned otherwise ({log.spec})")
        for line in found[:5]:
            print(f"  {line}")


if __name__ == "__main__":
    main()
