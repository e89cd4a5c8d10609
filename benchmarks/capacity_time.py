"""How long a capacity to 2 % takes: `python benchmarks/capacity_time.py [--jobs 2] [--policy SPEC] [--precision P]`

The Azure conversation trace, one replica, p90 of tpot_chunk within 50 ms. Other work on the machine changes wall time,
hardly processor time (summed over processes), of which two cores need at least half.
"""

import argparse
import os
import resource
import time

from joblib.externals.loky import get_reusable_executor

from dsim.planner.capacity import Capacity, capacity
from dsim.results.world import World

SLO = "p90:tpot_chunk=50ms"


def show(found: Capacity) -> None:
    rate = found.rate
    print(
        f"{found.policy}: {rate.value:.3f} req/s ({rate.low:.3f} to {rate.high:.3f}), ±{100 * rate.half_width:.2f} % "
        f"(asked: {100 * found.precision:g} %); {len(found.replications)} replications, {found.num_replays} replays of "
        f"{found.num_requests:,} requests; {found.binding_slo} binds, {found.limited_by} limits"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--policy", default="optimus")
    parser.add_argument("--precision", type=float, default=0.02)
    given = parser.parse_args()
    began = time.perf_counter()
    found = capacity(World("azure-conv", policy=given.policy, slos=(SLO,)), precision=given.precision, jobs=given.jobs)
    wall = time.perf_counter() - began
    # A worker's time counts once it has ended.
    get_reusable_executor().shutdown(wait=True)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(u.ru_utime + u.ru_stime for u in used)
    show(found)
    print(
        f"{wall:.0f} s of wall time with {given.jobs} processes, {busy:.0f} s of processor time; "
        f"load of the machine at the end {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
