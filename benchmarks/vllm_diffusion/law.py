"""A law of steps a canvas, fitted to the runs of a case and judged on the runs that repeat its loads.

    python -m dsim.benchmarks.vllm_diffusion.law OUT CASE RATES

`dsim profile` fits OUT/CASE/law.json to the calibration and the first run of each load together. The second run of a
load sends other prompts of the same lengths at the same times: its steps a request and its mean e2el are compared with
their distributions over seeds of the law. A step's price is that of the second runs: it drifts on a shared machine.
"""

import heapq
import json
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dsim.benchmarks.vllm_diffusion.canvases_table import HIGH, LOW, Measured
from dsim.engine.step import Phase
from dsim.profiler.profile import Profile
from dsim.profiler.profile import load as load_profile
from dsim.sim.twin import simulate

SEEDS = 200
DENOISE = "denoise"


def joined(paths: list[Path], out: Path) -> None:
    """Write the logs of one server's runs as one log, by time.

    Lines of a log keep their order: a request may arrive after the start of the step that takes it.
    """
    header, *_ = paths[0].read_text().splitlines()
    logs = [path.read_text().splitlines()[1:] for path in paths]
    timed = [zip(accumulate(map(at, lines), max), lines, strict=True) for lines in logs]
    merged = heapq.merge(*timed, key=lambda pair: pair[0])
    out.write_text("\n".join([header, *(line for _, line in merged)]) + "\n")


def at(line: str) -> float:
    """A line's time (s)."""
    held = json.loads(line)
    return float(next(held[name] for name in ("arrival", "start", "time") if name in held))


def predicted(run: Measured, seed: int) -> tuple[float, float]:
    """Denoising steps a request, and the mean e2el (s), under a seed of the law."""
    rows = 0

    def count(columns: Any, lists: Any) -> None:
        nonlocal rows
        rows += int((lists["phases"][0] == Phase.DENOISE).sum())

    table = simulate(run.trace, run.setting, seed=seed, append=count).table
    return rows / len(run.trace), float((table["finish"] - run.trace.arrival).mean())


def judged(measured: float, drawn: list[float]) -> str:
    """Three cells: measured, predicted, and the share of seeds below."""
    low, high = np.quantile(drawn, (LOW, HIGH))
    below = np.mean(np.array(drawn) < measured)
    return f"{measured:.2f} | {np.mean(drawn):.2f} ({low:.2f}..{high:.2f}) | {100 * below:.0f} %"


def fitted(folder: Path, name: str, runs: list[str]) -> Profile:
    """The profile that `dsim profile` fits to these runs' logs together."""
    log, out = folder / f"{name}.steps.jsonl", folder / f"{name}.json"
    joined([folder / f"{run}.steps.jsonl" for run in runs], log)
    subprocess.run(
        [sys.executable, "-m", "dsim", "profile", "--from-log", log, "-o", out, "--force"],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return load_profile(out)


def main() -> None:
    out, case, asked = sys.argv[1:]
    folder, rates = Path(out) / case, asked.split(",")
    known = fitted(folder, "law", ["calibration", *(f"measured-{rate}" for rate in rates)])
    priced = fitted(folder, "prices", [f"again-{rate}" for rate in rates])
    print(known.canvas_laws[0].source)
    profile = replace(known, latency=priced.latency)
    for rate in rates:
        run = Measured(folder / f"again-{rate}.steps.jsonl", profile)
        steps = sum(row["phases"] == DENOISE for rows in run.log.rows for row in rows) / len(run.trace)
        drawn = [predicted(run, seed) for seed in range(SEEDS)]
        cells = judged(steps, [x for x, _ in drawn]), judged(float(run.e2el.mean()), [x for _, x in drawn])
        print(f"| {rate} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
