"""How long a sweep takes, and a second core's gain. `python benchmarks/sweep.py [cells|scaling ...]`

cells: 200 cells (five policies x ten rates x four seeds, 1,500 requests of the Azure conversation trace), two jobs; at
most 60 s are asked. scaling: 16 cells of a second and more with one job and two; efficiency t(1) / (2 t(2)), at least
85 %. resume: 10,000 cells of 20 requests, and the same command again: its store (at most 10 MB), the time until it
knows what is left (3 s), and its end. Workers are fresh. On a busy machine the ratio of CPU times is what two idle
cores would give, and a plain loop, alone and twice at once, says how busy it is.
"""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from dsim.planner.sweep import sweep

POLICIES = ["ar", "lmdeploy-bd32", "chunk:8", "optimus", "optimus,obs=true"]


def timed(config: dict[str, Any], jobs: int) -> tuple[float, float]:
    """s with its folder, by the clock and of processors."""
    get_reusable_executor().shutdown(wait=True)
    with tempfile.TemporaryDirectory() as folder:
        start, busy = time.perf_counter(), cpu_time()
        done = sweep(config, Path(folder) / "out", jobs=jobs)
        took = time.perf_counter() - start
        get_reusable_executor().shutdown(wait=True)  # a worker's time counts once it has ended
        busy = cpu_time() - busy
    assert done.num_run == done.num_cells
    assert done.table["error"].isna().all()
    print(
        f"{done.num_cells:4} cells with {jobs} job{'s' if jobs > 1 else ' '}: {took:6.1f} s, {busy:6.1f} s of CPU, "
        f"{busy / done.num_cells:.2f} s a cell; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return took, busy


def resumed() -> None:
    """10,000 cells, and the same again."""
    grid = {"policy": POLICIES, "rate": [i / 4 for i in range(1, 21)], "seed": list(range(100))}
    config = {
        "base": {"trace": "azure-conv", "num_requests": 20, "slos": ["ttft=2s", "norm_latency=60ms"]},
        "grid": grid,
    }
    with tempfile.TemporaryDirectory() as folder:
        sweep(config, Path(folder) / "out", jobs=2)
        start, busy, known = time.perf_counter(), time.process_time(), []
        done = sweep(
            config, Path(folder) / "out",
            progress=lambda ended, of: known.append((time.perf_counter() - start, time.process_time() - busy)),
        )  # fmt: skip
        assert (done.num_run, done.num_reused) == (0, 10_000)
        size = (Path(folder) / "out" / "replays.db").stat().st_size
    print(
        f"10,000 cells: a store of {size / 1e6:.1f} MB; again: what is left is known after {known[0][0]:.1f} s, "
        f"{known[0][1]:.1f} s of CPU; all is written after {time.perf_counter() - start:.1f} s, "
        f"{time.process_time() - busy:.1f} s of CPU; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def cpu_time() -> float:
    """With ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def spin(count: int) -> float:
    start = time.perf_counter()
    total = 0
    for i in range(count):
        total += i
    return time.perf_counter() - start


def ceiling() -> float:
    """Share of double speed that two plain processes reach now."""
    with Parallel(2, backend="loky") as parallel:
        parallel(delayed(spin)(1000) for _ in range(2))
        alone = parallel(delayed(spin)(50_000_000) for _ in range(1))[0]
        together = max(parallel(delayed(spin)(50_000_000) for _ in range(2)))
    return float(alone / together)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["cells", "scaling"], help="cells, scaling, resume")
    which = parser.parse_args().which
    base = {"trace": "azure-conv", "slos": ["ttft=2s", "norm_latency=60ms"]}
    if "cells" in which:
        rates = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0]
        grid = {"policy": POLICIES, "rate": rates, "seed": [0, 1, 2, 3]}
        timed({"base": base | {"num_requests": 1500}, "grid": grid}, jobs=2)
    if "resume" in which:
        resumed()
    if "scaling" in which:
        grid = {"policy": ["optimus", "chunk:8"], "rate": [1.0, 2.0], "seed": [0, 1, 2, 3]}
        config = {"base": base | {"num_requests": 8000}, "grid": grid}
        print(f"two plain loops at once reach {ceiling():.0%} of twice the speed", flush=True)
        (one, one_busy), (two, two_busy) = timed(config, jobs=1), timed(config, jobs=2)
        print(f"efficiency on two cores: {one / (2 * two):.0%} by the clock, {one_busy / two_busy:.0%} by CPU time")


if __name__ == "__main__":
    main()
