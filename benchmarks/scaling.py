"""What to scale a diffusion fleet on: each scaler on one day of traffic; docs/scaling.md's tables.

    python -m dsim.benchmarks.scaling [FOLDER]

Each hour is azure-conv's, begun at a random minute, thinned by a day's curve (35 % at 4:00, 100 % at 16:00) times a
factor of that hour (log-normal, deviation 0.15): lengths and bursts within an hour are real, the curve is not.
"""

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dsim.planner.memo import Memo
from dsim.planner.scaled import Comparison, bounds_of, compare_scalers
from dsim.report.table import number
from dsim.results.scenario import Scenario
from dsim.results.slo import Slo
from dsim.traces import Trace, load

LOW = 4  # o'clock
LEAST = 0.35  # share of requests at the lowest hour
BURST = 0.15
# Description; profile, policy, SLOs; multiple of the real rate; longest request kept, tokens.
SETTINGS = (
    ("LLaDA-8B, full sequences, on L40S", "l40s-llada-8b/fast-dllm", "fast-dllm",
     ("ttft=20s", "norm_latency=80ms"), 0.1, 4096),
    ("SDAR-8B, blocks of 32, eight rows at most, on A100", "a100-sdar-8b", "optimus,max_batch=8",
     ("ttft=2s", "norm_latency=80ms"), 0.5, 32768),
)  # fmt: skip
STARTUP = "provision=240+-30,load=18,compile=43"
GOAL = 0.95


def day(seed: int = 0, hours: int = 24, scale: float = 1.0) -> Trace:
    """scale: of the real hour's rate, at the peak."""
    hour, random = load("azure-conv"), np.random.default_rng(seed)
    length = 3600.0
    rows, times = [], []
    for h in range(hours):
        cosine = 0.5 - 0.5 * np.cos(2 * np.pi * (h - LOW) / 24)
        share = scale * (LEAST + (1 - LEAST) * cosine) * random.lognormal(0.0, BURST)
        begun = random.uniform(0, length)
        for _ in range(int(np.ceil(share))):  # above the real rate, requests come from several minutes
            kept = np.flatnonzero(random.random(len(hour)) < share / np.ceil(share))
            rows.append(kept)
            times.append(h * length + (hour.arrival[kept] - begun) % length)
            begun = random.uniform(0, length)
    row, time = np.concatenate(rows), np.concatenate(times)
    order = np.argsort(time, kind="stable")
    return hour.take(row[order], time[order])


def compare(trace: Path, profile: str, policy: str, slos: tuple[str, ...], memo: Memo | None = None) -> Comparison:
    """A plan's scalers, and the other modes of Dynamo's load loop."""
    scenario = Scenario(str(trace), policy=policy, profile=profile, slos=slos, router="jsq")
    own = partial(
        compare_scalers, scenario, startup=STARTUP, goal=GOAL, memo=memo,
        progress=lambda doing, done, of: print(f"  {doing}", file=sys.stderr),
    )  # fmt: skip
    found = own()
    modes = [f"dynamo-load,mode=sla{bounds_of([Slo.parse(slo) for slo in slos])},budget=64"]
    modes += [f"dynamo-load,mode={mode},budget=64" for mode in ("throughput", "latency")]
    *others, _ = own(modes, guess=found.fixed.replicas).scaled
    return replace(found, scaled=(*found.scaled[:1], *others, *found.scaled[1:]))


def lines(found: Comparison) -> list[str]:
    head = ["| scaler | GPU-hours | of the fixed | meet the SLOs | worst quarter of an hour | flaps | to react |"]
    head.append("|---|---|---|---|---|---|---|")
    for one in (found.fixed, *found.scaled):
        name = f"{one.replicas} fixed" if one is found.fixed else f"`{one.scaler}`"
        reacted = f"{number(one.reaction)} s ({one.answered} of {one.rises})" if one.answered else "–"
        head.append(
            f"| {name} | {number(one.gpu_hours)} | {100 * one.gpu_hours / found.fixed.gpu_hours:.0f} % | "
            f"{100 * one.attainment:.1f} % | {100 * one.worst:.1f} % | {one.flaps} | {reacted} |"
        )
    return head


def main(folder: Path) -> None:
    memo = Memo()
    memo.open(folder / "replays.sqlite")
    for name, profile, policy, slos, scale, longest in SETTINGS:
        trace = folder / f"day-{scale:g}.csv"
        requests = day(scale=scale)
        fits = np.flatnonzero(requests.input_length + requests.output_length <= longest)
        requests = requests.take(fits, requests.arrival[fits])
        requests.to_frame().to_csv(trace, index=False)
        print(f"\n{name} (`{policy}`, `{profile}`): {len(requests):,} requests, {' and '.join(slos)}, {GOAL:.0%}\n")
        print("\n".join(lines(compare(trace, profile, policy, slos, memo))), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
