"""The table of `benchmarks/vllm_diffusion_cpu.sh`, printed, and put between two marks of benchmarks/validation.md.

    python -m dsim.benchmarks.vllm_diffusion.canvases_table OUT DOCS CLOCK RATES CASE ...

DOCS: the page, or - for none. CLOCK: the engine's, wall or cpu. RATES: of the loads, `0.4,0.8`. All is measured in the
engine: its step log has the requests, their times and each step. A prediction replays the log's requests with the
profile of other traffic, under several seeds of the law of steps a canvas.
"""

import sys
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsim.benchmarks.vllm_cpu_table import OWN, percent, processor, put
from dsim.benchmarks.vllm_diffusion.plans import SAME_TIME, Log, planned
from dsim.comparison.clients.client_file import read_client
from dsim.comparison.clients.measured import MeasuredRun, measured_run
from dsim.comparison.error_parts import per_request
from dsim.comparison.latencies import Latencies
from dsim.comparison.recorded_commits import Commits
from dsim.comparison.rerun import Recording, rerun
from dsim.comparison.steps import Journal
from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable
from dsim.engine.prefix import caches_prefixes
from dsim.engine.spec import parse
from dsim.profiler.profile import Profile
from dsim.profiler.profile import load as load_profile
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace, load
from dsim.traces.prefixes import prefixes_of

BEGIN, END = "<!-- vllm-diffusion-cpu: benchmarks/vllm_diffusion_cpu.sh writes this -->", "<!-- /vllm-diffusion-cpu -->"
SEEDS = 20
LOW, HIGH = 0.1, 0.9  # quantiles over seeds

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prefixed(Recording):
    """A recording whose engines share the prefixes of the trace's prompts."""

    trace: Trace = field(kw_only=True)

    def engine(self, table: RequestTable, replica: int) -> Engine:
        prefixes = prefixes_of(self.trace) if caches_prefixes(self.policy) else None
        return self.setting.engine(table, replica=replica, emit=self.emit, prefixes=prefixes)


@dataclass(frozen=True)
class Measured:
    """A run of a load: its log, and a profile fitted to other traffic on the same server."""

    path: Path
    profile: Profile

    @cached_property
    def log(self) -> Log:
        return Log(self.path)

    @cached_property
    def trace(self) -> Trace:
        return load(self.path)

    @cached_property
    def setting(self) -> Setting:
        """The engine's settings with the profile."""
        return Setting(parse(self.log.spec), self.profile)

    @cached_property
    def run(self) -> MeasuredRun:
        """The log as a run."""
        client = read_client(self.path)
        return measured_run(client, policy=self.log.spec, engine=client.steps)

    @cached_property
    def e2el(self) -> Floats:
        """Of each request, in s."""
        return per_request(self.run.columns, np.arange(len(self.trace)))["e2el"]

    def rule(self) -> float:
        """The error of the mean e2el with measured times of steps and measured steps of canvases."""
        assert self.run.journal is not None
        (steps, lists), requests, policy = self.run.journal, self.run.columns, self.setting.policy
        recording = Prefixed(self.setting, self.setting.limits, "block", trace=self.trace)
        steps = {**steps, "latency": steps["latency"] + woken(steps["start"], steps["latency"], requests["arrival"])}
        journal = Journal(steps, lists, requests)
        commits = Commits(requests, policy, recording.width)
        commits.record_log(journal, policy.block_length)
        price = Latencies(self.profile.latency, journal, policy, logged=True)
        rerun_columns = rerun(recording, requests, price, commits.of, lambda: None)
        return float(per_request(rerun_columns, np.arange(len(self.trace)))["e2el"].mean() / self.e2el.mean() - 1)

    def planned(self) -> tuple[int, int]:
        """Steps that dsim's engine plans as vLLM did, up to the first with other rows; and all steps."""
        num, found = planned(self.log, self.trace if caches_prefixes(self.setting.policy) else None)
        others = len(found) - (num < len(self.log.steps))  # the last line ends the comparison
        return num - others, len(self.log.steps)

    def predicted(self) -> list[float]:
        """The error of the mean e2el by seed."""
        errors = []
        for seed in range(SEEDS):
            table = simulate(self.trace, self.setting, seed=seed).table
            errors.append(float((table["finish"] - self.trace.arrival).mean() / self.e2el.mean() - 1))
        return errors


def woken(start: Floats, latency: Floats, arrival: Floats) -> Floats:
    """The time [steps] from the arrival that wakes an idle engine to its step's start, in s; 0 for other steps.

    In the twin such a step begins with the arrival.
    """
    before = np.append(-np.inf, (start + latency)[:-1])  # the previous step's end
    arrival = np.append(np.sort(arrival), np.inf)
    came = arrival[np.searchsorted(arrival, before, side="right")]
    return np.where((start > before + SAME_TIME) & (came < start), start - came, 0.0)


@dataclass
class Found:
    """The cases' values, a load each: of the mean e2el, but for the rules."""

    rules: list[float] = field(default_factory=list)  # error of the rule alone, of the worse run
    # Of loads served twice, by whether a law draws their steps: errors of the mean over seeds, and of the second run.
    beside: dict[bool, list[tuple[float, float]]] = field(default_factory=dict)


def row(case: str, loads: list[list[Measured]], found: Found) -> str:
    """A case's row with a value for each load, which are added to `found`. A load has one or two runs."""
    means, floors, rules, ranges, alike, of = [], [], [], [], 0, 0
    for first, *again in loads:
        means.append(f"{first.e2el.mean():.2f}")
        for run in again:
            shift, mape = run.e2el.mean() / first.e2el.mean() - 1, np.abs(run.e2el / first.e2el - 1).mean()
            floors.append(f"{100 * shift:+.0f}/{100 * mape:.0f}")
        if not again:
            floors.append("-")
        rules.append(max((run.rule() for run in (first, *again)), key=abs))
        for same, num in (run.planned() for run in (first, *again)):
            alike, of = alike + same, of + num
        errors = first.predicted()
        low, high = 100 * np.quantile(errors, (LOW, HIGH))
        spread = f"({low:+.0f}..{high:+.0f})" if low < high else ""  # none where requests' limits decide the steps
        ranges.append(f"{100 * np.mean(errors):+.0f}{spread}")
        if again:
            found.beside.setdefault(bool(low < high), []).append((float(np.mean(errors)), float(shift)))
    found.rules += rules
    cells = [
        f"`{case}`", ", ".join(means), ", ".join(floors), ", ".join(f"{100 * share:+.2f}" for share in rules),
        f"{alike}/{of}", ", ".join(ranges),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def beside_the_floor(found: Found) -> str:
    """What predictions are off by, beside what second runs are: a single pair of runs says little."""
    said = []
    for drawn, pairs in sorted(found.beside.items()):
        sizes = [percent(float(np.median(np.abs(errors)))) for errors in zip(*pairs, strict=True)]
        steps = "with a law" if drawn else "whose requests set their steps"
        said.append(f"{sizes[0]} and {sizes[1]} over the {len(pairs)} loads {steps}")
    return f"Median errors of the mean e2el, of predictions and of second runs: {'; '.join(said)}."


def requests_a_load(counts: dict[int, list[str]]) -> str:
    """The usual number of requests a load, and the cases with others. counts: number -> cases."""
    usual = max(counts, key=lambda number: len(counts[number]))
    others = [f"{', '.join(cases)}: {number}" for number, cases in counts.items() if number != usual]
    also = f" ({'; '.join(others)})" if others else ""
    return f"{usual} requests a load{also}"


def main() -> None:
    out, docs, clock, rates, *cases = sys.argv[1:]
    rows, found, started = [], Found(), 0.0
    counts: dict[int, list[str]] = {}
    for case in cases:
        folder = Path(out) / case
        profile = load_profile(folder / "profile.json")
        loads = []
        for rate in rates.split(","):
            paths = [folder / f"{run}-{rate}.steps.jsonl" for run in ("measured", "again")]
            runs = [Measured(path, profile) for path in paths if path.exists()]
            loads.append([run for run in runs if not np.isnan(run.e2el).any()])  # without runs that were cut short
        counts.setdefault(len(loads[0][0].trace), []).append(f"`{case}`")
        rows.append(row(case, loads, found))
        started = max(started, *(run.log.started for runs in loads for run in runs))
        print(rows[-1], flush=True)
    worst = max(map(abs, found.rules))
    seeds = f"prediction: mean ({100 * LOW:.0f}..{100 * HIGH:.0f} % of seeds)"
    text = "\n".join([
        f"{date.fromtimestamp(started)}, two cores of {processor()}, {requests_a_load(counts)} at {rates} req/s, "
        f"{SEEDS} seeds of the law of steps, where requests do not set them. Values: each load in turn, errors in %."
        + (" The engine ran on the clock of its CPU time." if clock == "cpu" else ""),
        "",
        "| case | mean e2el, s | noise floor: mean/MAPE | the rule alone, worse run | steps planned alike "
        f"| {seeds} |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Asked was a rule less than {percent(OWN)} off at a run's own prices of steps: {100 * worst:.2f} % at worst.",
        *([beside_the_floor(found)] if found.beside else []),
    ])  # fmt: skip
    print(text)
    put(docs, BEGIN, END, text)


if __name__ == "__main__":
    main()
