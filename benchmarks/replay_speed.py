"""How fast the twin replays, and in how much memory: `python benchmarks/replay_speed.py [azure|ar|canvas ...]`

azure: the Azure conversation trace, several policies, two replicas. canvas: four replicas of a canvas model. fleet: 64
and 1,000 replicas behind a router that compares them. scaled: 100 replicas, fixed and scaled. ar: 512±256 tokens in and
out at 1 req/s, autoregressive (against a peer: `benchmarks/peers.py`). full: full-sequence policies, ShareGPT lengths
at 80 % of capacity. alike: the share of steps that a leap could cover. prefix: the Mooncake trace with a prefix cache.
memory: a request's cost. compile: a policy's first run on a new machine. million: 1,000,000 ShareGPT requests, elastic
chunk, eight replicas at 80 % of capacity, in turn and by a router that looks at them. day: 10,000,000 ShareGPT requests
in a day, a canvas model, a router that compares 1,000 replicas, fixed and with a scaler that is asked every 15 s.

One process; processor time after compilation, medians of several runs. `-o` also writes the journal. Each million has
its own process, for its memory.
"""

import argparse
import collections
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsim.benchmarks.prefix_gain import CACHED, PROFILE, REPLICAS, requests
from dsim.engine.core import MANY_REQUESTS
from dsim.engine.spec import parse
from dsim.engine.state import PREFILL
from dsim.profiler.profile import DEFAULT, load
from dsim.results.metrics import Summary, summarize
from dsim.results.run_folder import RunWriter
from dsim.sim.pools import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace, synth
from dsim.traces import load as load_trace

FULL_SEQUENCE, CANVAS = "rtx4090-48gb-llada-8b", "h100-diffusiongemma-fp8"
MILLION = 1_000_000
DAY = 86_400  # s


def once(trace: Trace, policy: str, replicas: int, router: str, profile: str, journal: bool) -> tuple[float, Summary]:
    """CPU s of a replay with metrics and journal; metrics."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder) / "run") as writer:
        append = partial(writer.append, policy) if journal else None
        run = simulate(trace, Setting(parse(policy), load(profile)), replicas=replicas, router=router, append=append)
        summary = summarize(policy, run.table.columns, run.totals, replicas=replicas)
        if journal:
            writer.requests(policy, run.table.columns)
    return time.process_time() - start, summary


def timed(
    name: str, trace: Trace, policy: str, replicas: int, *, router: str = "round-robin", profile: str = DEFAULT,
    runs: int = 3, journals: tuple[bool, ...] = (False, True),
) -> None:  # fmt: skip
    """Without the journal and with it."""
    once(trace.head(100), policy, replicas, router, profile, False)
    for journal in journals:
        done = [once(trace, policy, replicas, router, profile, journal) for _ in range(runs)]
        took, s = statistics.median(seconds for seconds, _ in done), done[0][1]
        steps = s.num_decode_steps + s.num_prefill_steps
        print(
            f"{name:8} {policy:15} {'-o' if journal else '  '} {len(trace):>9,} requests x {replicas}, {router}: "
            f"{took:6.2f} s of CPU, {len(trace) / took:8,.0f} req/s, {steps / took:9,.0f} steps/s; "
            f"stable {s.stable}, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def memory(policy: str) -> None:
    """Bytes a request: the peak of 20,000 minus that of 10,000."""
    profile, parsed = load(DEFAULT), parse(policy)
    peaks = []
    for num in (1000, 10_000, 20_000):  # the first compiles
        trace = synth("poisson", 2.0, lengths="sharegpt", num_requests=num)
        tracemalloc.start()
        simulate(trace, Setting(parsed, profile))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(f"memory   {policy:15} {(peaks[2] - peaks[1]) / 10_000:.0f} bytes a request")


def first_run(policy: str, profile: str) -> None:
    """A short run with nothing compiled, one long enough to compile, and that again."""
    with tempfile.TemporaryDirectory() as folder:
        took = []
        for num_requests in (10, MANY_REQUESTS, MANY_REQUESTS):
            before = _children()
            command = [sys.executable, __file__, "--once", policy, profile, str(num_requests)]
            subprocess.run(command, check=True, env={**os.environ, "NUMBA_CACHE_DIR": folder})
            took.append(_children() - before)
    print(
        f"compile  {policy:15} {took[0]:5.1f} s of CPU for ten requests, {took[1]:.1f} s for {MANY_REQUESTS}, "
        f"{took[2]:.1f} s for as many again; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def capacity(policy: str, replicas: int, profile: str = DEFAULT) -> float:
    """req/s of a saturated fleet, ShareGPT lengths."""
    trace = synth("poisson", 1000.0, lengths="sharegpt", num_requests=3000)
    run = simulate(trace, Setting(parse(policy), load(profile)))
    return replicas * summarize(policy, run.table.columns, run.totals).request_throughput


def alike(name: str, trace: Trace, policy: str, replicas: int, profile: str = DEFAULT) -> None:
    """Print the share of steps with the rows, phases and tokens of the step before, in which no request ends."""
    found = collections.Counter[str]()
    last: dict[int, Any] = {}

    def append(steps: Any, lists: Any) -> None:
        columns = [lists[name][0] for name in ("requests", "phases", "num_tokens")]
        offsets = lists["phases"][1]
        for i, replica in enumerate(steps["replica"].tolist()):
            rows = [column[offsets[i] : offsets[i + 1]] for column in columns]
            step = [part.tobytes() for part in rows]
            same = step == last.get(replica) and not steps["finished"][i]
            found.update(steps=1, same=same, chunks=same and bool((rows[1] == PREFILL).any()))
            last[replica] = step

    simulate(trace, Setting(parse(policy), load(profile)), replicas=replicas, append=append)
    same, chunks = found["same"] / found["steps"], found["chunks"] / found["steps"]
    print(
        f"alike    {name:8} {policy:40} {same:.1%} of {found['steps']:,} steps, with a chunk {chunks:.1%}", flush=True
    )


def fleet(policy: str, profile: str, replicas: int) -> None:
    """20,000 requests on many replicas at 80 % of capacity, with a router that compares them all."""
    trace = synth("poisson", 0.8 * capacity(policy, replicas, profile), lengths="sharegpt", num_requests=20_000)
    once(trace.head(MANY_REQUESTS), policy, 2, "least-tokens", profile, False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timed("fleet", trace, policy, replicas, router="least-tokens", profile=profile, journals=(False,))
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / replicas
    print(f"fleet    {policy:15} {more:,.0f} bytes a replica at the most", flush=True)


def scaled() -> None:
    """60,000 requests on 100 replicas, fixed and scaled."""
    trace = synth("poisson", 150.0, lengths="lognormal:512,256,256,128", num_requests=60_000, seed=1)
    setting = Setting(parse("optimus,max_batch=8"), load(DEFAULT))
    found = {}
    for spec in ("fixed", "hpa,metric=requests,target=6,least=90,most=140"):
        pool = Pool(setting, 100, startup=60.0)
        fleet = Fleet((pool,), routing("jsq"), None if spec == "fixed" else scaling(spec))
        took = []
        for _ in range(4):
            begin = time.process_time()
            run = simulate(trace, fleet)
            took.append(time.process_time() - begin)
        numbers = {change.ready for change in run.changes} or {100}
        found[spec] = statistics.median(took[1:])  # the first compiles
        print(
            f"scaled   {spec:50} {min(numbers)} to {max(numbers)} replicas {len(trace) / found[spec]:9,.0f} req/s",
            flush=True,
        )
    fixed, with_scaler = found.values()
    print(f"scaled   with a scaler {fixed / with_scaler:.2f} of the speed", flush=True)


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """In a process of its own, for its memory."""
    run = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    run.start()
    run.join()


def million(rate: float, router: str) -> None:
    trace = synth("poisson", rate, lengths="sharegpt", num_requests=MILLION)
    timed("million", trace, "optimus", 8, router=router, runs=1, journals=(False,))


def day(scaler: str | None) -> None:
    """Replay ten million requests in a day on 1,000 replicas, or on as many as a scaler starts."""
    pool = Pool(Setting(parse("vllm-diffusion"), load(CANVAS)), 1000, startup=60.0)
    fleet = Fleet((pool,), routing("least-tokens"), None if scaler is None else scaling(scaler))
    trace = synth("poisson", 10 * MILLION / DAY, lengths="sharegpt", num_requests=10 * MILLION)
    simulate(trace.head(10 * MANY_REQUESTS), fleet)
    begin = time.process_time()
    run = simulate(trace, fleet)
    summary = summarize("vllm-diffusion", run.table.columns, run.totals, replicas=1000)
    took, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    numbers = {change.ready for change in run.changes} or {1000}
    print(
        f"day      {scaler or 'fixed':50} {min(numbers)} to {max(numbers)} replicas, {summary.completed:,} requests, "
        f"{took:.0f} s of CPU, peak {peak:,.0f} MiB; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    names = (
        *("azure", "ar", "canvas", "full", "alike", "prefix"),
        *("fleet", "scaled", "memory", "compile", "million", "day"),
    )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["azure", "ar", "canvas", "full", "memory"], help=", ".join(names))
    once = "replay so many requests and print nothing"
    parser.add_argument("--once", nargs=3, metavar=("POLICY", "PROFILE", "REQUESTS"), help=once)
    given = parser.parse_args()
    if given.once:
        policy, profile, num_requests = given.once
        simulate(load_trace("azure-conv").head(int(num_requests)), Setting(parse(policy), load(profile)))
        return
    which = given.which
    if "azure" in which:
        for policy in ("optimus", "chunk:8", "lmdeploy-bd32", "ar", "vllm-ar"):
            timed("azure", load_trace("azure-conv"), policy, 2)
    if "ar" in which:
        timed("ar", synth("poisson", 1.0, lengths="normal:512,256", num_requests=20_000), "ar", 1)
        timed("ar", synth("poisson", 1.0, lengths="normal:512,256", num_requests=20_000), "vllm-ar", 1)
    if "full" in which:
        for policy in ("dllm-serve", "sparse-dllm", "dllm-cache"):
            rate = 0.8 * capacity(policy, 1, FULL_SEQUENCE)
            trace = synth("poisson", rate, lengths="sharegpt", num_requests=3000)
            timed("full", trace, policy, 1, profile=FULL_SEQUENCE)
    if "alike" in which:
        for policy in ("dllm-serve", "sparse-dllm", "dllm-cache"):
            trace = synth("poisson", 0.8 * capacity(policy, 1, FULL_SEQUENCE), lengths="sharegpt", num_requests=400)
            alike("full", trace, policy, 1, FULL_SEQUENCE)
        alike("azure", load_trace("azure-conv").head(1500), "lmdeploy-bd32", 2)
        for policy in ("vllm-ar", "vllm-ar,max_num_batched_tokens=512"):
            alike("azure", load_trace("azure-conv").head(6000), policy, 2)
        for policy in ("vllm-ar", "vllm-ar,max_num_batched_tokens=512"):
            alike("prefix", requests().head(2000), policy, REPLICAS, PROFILE)
    if "prefix" in which:
        for policy, router in ((CACHED, "prefix"), (CACHED, "round-robin"), ("vllm-ar", "round-robin")):
            timed("prefix", requests(), policy, REPLICAS, router=router, profile=PROFILE)
    if "canvas" in which:
        trace = synth("poisson", 0.8 * capacity("vllm-diffusion", 4, CANVAS), lengths="sharegpt", num_requests=20_000)
        timed("canvas", trace, "vllm-diffusion", 4, profile=CANVAS)
    if "fleet" in which:
        for policy, profile in (("optimus", DEFAULT), ("ar", DEFAULT), ("vllm-diffusion", CANVAS)):
            for replicas in (64, 1000):
                apart(fleet, policy, profile, replicas)
    if "scaled" in which:
        scaled()
    if "memory" in which:
        for policy in ("optimus", "ar"):
            memory(policy)
    if "compile" in which:
        for policy in ("ar", "lmdeploy-bd32", "optimus", "dllm-serve"):
            first_run(policy, FULL_SEQUENCE if policy == "dllm-serve" else DEFAULT)
    if "million" in which:
        rate = 0.8 * capacity("optimus", 8)
        print(f"million  optimus at {rate:.1f} req/s, 80 % of what eight replicas complete when saturated", flush=True)
        for router in ("round-robin", "least-tokens"):
            apart(million, rate, router)
    if "day" in which:
        for scaler in (None, "hpa,metric=requests,target=0.3,least=100,most=1000"):
            apart(day, scaler)


if __name__ == "__main__":
    main()
