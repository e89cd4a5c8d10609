"""Elastic, fixed block, fixed chunk and autoregressive on the same traffic. `python benchmarks/ranking.py [--graphs]`

ShareGPT lengths, Poisson arrivals from idle to overload, one A100 with SDAR-8B, four seeds a cell, the same requests
and luck for every policy. Prints research/evidence/ranking.md's tables in about a minute on one core.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from dsim.planner.replicate import student
from dsim.results.metrics import Summary
from dsim.results.world import World
from dsim.traces import synth

RATES = (0.5, 4.0, 6.0, 8.0, 12.0, 20.0)  # req/s
CHUNKS = (4, 8, 12, 16, 24, 32)
POLICIES = (
    "optimus", *(f"chunk:{c}" for c in CHUNKS), "lmdeploy-bd32", "lmdeploy-bd32,num_loops=1", "ar",
    "optimus,max_prefill_tokens=8192", "chunk:4,max_prefill_tokens=8192", "lmdeploy-bd32,max_prefill_tokens=8192",
)  # fmt: skip
SLOS = ("ttft=5s", "norm_latency=50ms")


@dataclass(frozen=True)
class Cell:
    """Over the seeds."""

    runs: list[Summary]

    def mean(self, path: str) -> tuple[float, float]:
        """Mean, and half of its 95 % interval."""
        name, _, stat = path.partition(".")
        values = [getattr(getattr(r, name), stat) if stat else getattr(r, name) for r in self.runs]
        return float(np.mean(values)), student(np.array(values))


def cell(policy: str, rate: float, profile: str, num_requests: int, seeds: int) -> Cell:
    runs = []
    for seed in range(seeds):
        world = World("azure-conv", policy=policy, profile=profile, slos=SLOS, seed=seed)
        requests = synth("poisson", rate, lengths="sharegpt", num_requests=num_requests, seed=seed)
        runs.append(world.run(requests))
    return Cell(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", action="store_true", help="captured graphs in place of eager mode")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    args = parser.parse_args()
    profile = "a100-sdar-8b/graphs" if args.graphs else "a100-sdar-8b"
    for rate in args.rates:
        print(f"\n{profile}, {rate:g} req/s\n")
        print("| policy | norm_latency p50 (ms) | p90 (ms) | good (%) | req/s | step (ms) | batch | chunk | use (%) |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for policy in args.policies:
            c = cell(policy, rate, profile, args.requests, args.seeds)
            p50, e50 = c.mean("norm_latency_ms.p50")
            p90, e90 = c.mean("norm_latency_ms.p90")
            good = 100 * c.mean("slo_attainment")[0]
            served = c.mean("request_throughput")[0]
            step, batch, chunk = (c.mean(k)[0] for k in ("step_latency_ms.p50", "batch.mean", "chunk.mean"))
            use = 100 * c.mean("token_utilization")[0]
            unstable = "" if all(r.stable for r in c.runs) else " (queue grows)"
            print(
                f"| `{policy}` | {p50:.1f} ± {e50:.1f} | {p90:.1f} ± {e90:.1f} | {good:.0f} | {served:.2f}{unstable} "
                f"| {step:.0f} | {batch:.0f} | {chunk:.0f} | {use:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
