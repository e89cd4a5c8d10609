"""How fast the twin replays, and in how much memory. `python benchmarks/replay.py [azure|ar|million ...]`

azure: the Azure conversation trace under several policies, two replicas. ar: the published peers' workload, 512±256
tokens in and out at 1 req/s, autoregressive (the fastest open peer, compiled Go: 926 req/s at 50 KB a request; a Python
peer: 568). million: 1,000,000 requests of ShareGPT lengths, elastic chunk, eight replicas at 80 % of their capacity.
Compilation is done before the clock starts. One process, one core.
"""

import argparse
import resource
import time
import tracemalloc

from dsim.engine.policy import parse
from dsim.profiler.profile import DEFAULT, load
from dsim.report.metrics import summarize
from dsim.sim.twin import simulate
from dsim.traces import Trace, synth
from dsim.traces import load as load_trace


def timed(name: str, trace: Trace, policy: str, replicas: int) -> None:
    """Replay once and print the figures."""
    profile = load(DEFAULT)
    simulate(trace.head(100), profile, parse(policy), replicas=replicas)
    start = time.perf_counter()
    run = simulate(trace, profile, parse(policy), replicas=replicas)
    took = time.perf_counter() - start
    s = summarize(policy, run.table.columns, run.totals, replicas=replicas)
    steps = s.num_decode_steps + s.num_prefill_steps
    print(
        f"{name:8} {policy:15} {len(trace):>9,} requests x {replicas}: {took:7.1f} s, {len(trace) / took:8,.0f} req/s, "
        f"{steps / took:9,.0f} steps/s; stable {s.stable}, "
        f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of process",
        flush=True,
    )


def memory(policy: str) -> None:
    """Bytes that a request costs: what a replay of 4,000 allocates at its peak beyond one of 2,000."""
    peaks = []
    for num in (2000, 4000):
        trace = synth("poisson", 2.0, lengths="sharegpt", num_requests=num)
        tracemalloc.start()
        simulate(trace, load(DEFAULT), parse(policy))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(f"memory   {policy:15} {(peaks[1] - peaks[0]) / 2000:.0f} bytes a request")


def capacity(policy: str, replicas: int) -> float:
    """Requests per second that a saturated fleet completes, ShareGPT lengths."""
    trace = synth("poisson", 1000.0, lengths="sharegpt", num_requests=3000)
    run = simulate(trace, load(DEFAULT), parse(policy))
    return replicas * summarize(policy, run.table.columns, run.totals).request_throughput


def main() -> None:
    """Run the benchmarks named, or the short ones."""
    names = ("azure", "ar", "memory", "million")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["azure", "ar", "memory"], help=", ".join(names))
    which = parser.parse_args().which
    if "azure" in which:
        for policy in ("optimus", "chunk:8", "lmdeploy-bd32", "sglang-bd32", "ar"):
            timed("azure", load_trace("azure-conv"), policy, 2)
    if "ar" in which:
        timed("ar", synth("poisson", 1.0, lengths="normal:512,256", num_requests=20_000), "ar", 1)
    if "memory" in which:
        for policy in ("optimus", "ar"):
            memory(policy)
    if "million" in which:
        rate = 0.8 * capacity("optimus", 8)
        print(f"million  optimus at {rate:.1f} req/s, 80 % of what eight replicas complete when saturated")
        timed("million", synth("poisson", rate, lengths="sharegpt", num_requests=1_000_000), "optimus", 8)


if __name__ == "__main__":
    main()
