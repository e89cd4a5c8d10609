"""A peer's replay against ours, in CPU seconds. `python benchmarks/peers.py [--peer-python PATH] [ar|azure ...]`

The peer is the replay of NVIDIA Dynamo's mocker (`dynamo._core.run_mocker_trace_replay`, compiled Rust), which is
autoregressive: both replay the same requests token by token: 512±256 tokens in and out at 1 req/s on one replica, and
the Azure conversation trace on two, in turn. The peer runs with its defaults, and with our pages, batch, prefill
budget, no prefix cache and our mean step times, so that both make about as many steps. Our elastic policy is added.

A clock starts when the program is loaded (and compiled) and stops at the metrics; the peer also reads a file, some
milliseconds. The two alternate, so that a busy machine slows both alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dsim.engine.spec import parse
from dsim.profiler.profile import DEFAULT, load
from dsim.results.metrics import Summary, summarize
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace, synth
from dsim.traces import load as load_trace

PACKAGES = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
PEER = "Dynamo 1.6.1"

# Under the peer's interpreter: JSON in, JSON out.
REPLAY = """
import json, sys, time
from dynamo._core import run_mocker_trace_replay
given = json.loads(sys.argv[1])
start = time.process_time()
summary = run_mocker_trace_replay([given.pop("trace")], **given).summary
took = time.process_time() - start
print(json.dumps({"cpu": took, "completed": summary["completed_requests"], "tpot_ms": summary["mean_tpot_ms"]}))
"""


def ours(trace: Trace, policy: str, replicas: int) -> tuple[float, Summary]:
    """CPU s of a replay with its metrics; metrics."""
    start = time.process_time()
    run = simulate(trace, Setting(parse(policy), load(DEFAULT)), replicas=replicas)
    summary = summarize(policy, run.table.columns, run.totals, replicas=replicas)
    return time.process_time() - start, summary


def peers(python: str, arguments: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """CPU s of the peer's replay; metrics."""
    done = subprocess.run([python, "-c", REPLAY, json.dumps(arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{PEER} failed: {done.stderr.strip()}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result["cpu"], result


def write(trace: Trace, path: Path, block: int) -> None:
    """The peer's format; no shared prefix."""
    made = 0
    with path.open("w") as file:
        for i in range(len(trace)):
            request = trace.request(i)
            blocks = -(-request.input_length // block)
            row = {
                "timestamp": 1000 * request.arrival,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(range(made, made + blocks)),
            }
            made += blocks
            file.write(json.dumps(row) + "\n")


def compare(name: str, trace: Trace, replicas: int, python: str, runs: int) -> None:
    profile, policies = load(DEFAULT), ("ar", "optimus")
    for policy in policies:
        simulate(trace.head(100), Setting(parse(policy), profile), replicas=replicas)  # compile
    limits, block = Setting(parse("ar"), profile).limits, parse("ar").memory.page_size
    totals = simulate(trace, Setting(parse("ar"), profile), replicas=replicas).totals
    fixed = {
        "type": "fixed",
        "prefill_ms": 1000 * totals.prefill_time / totals.num_prefill_steps,
        "decode_ms": 1000 * totals.decode_time / totals.num_decode_steps,
    }
    like_ours = {
        "num_gpu_blocks": limits.num_pages,
        "block_size": block,
        "max_num_seqs": limits.max_batch,
        "max_num_batched_tokens": limits.max_prefill_tokens,
        "enable_prefix_caching": False,
        "timing_model": fixed,
    }
    engines: dict[str, dict[str, Any]] = {"as it comes": {"block_size": block}, "set like ours": like_ours}
    seconds: dict[str, list[float]] = {}
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write(trace, path, block)
        for _ in range(runs):
            for setting, engine in engines.items():
                arguments = {
                    "trace": str(path),
                    "trace_block_size": block,
                    "num_workers": replicas,
                    "extra_engine_args": {"engine": engine},
                }
                took, result = peers(python, arguments)
                key = f"{PEER}, ar, {setting}"
                seconds.setdefault(key, []).append(took)
                ended[key] = f"{result['completed']:,} done, {result['tpot_ms']:.1f} ms a token"
            for policy in policies:
                took, summary = ours(trace, policy, replicas)
                seconds.setdefault(f"dsim, {policy}", []).append(took)
                ended[f"dsim, {policy}"] = f"{summary.completed:,} done, {summary.tpot_ms.mean:.1f} ms a token"
    print(f"{name}: {len(trace):,} requests, replicas: {replicas}; load {os.getloadavg()[0]:.1f}")
    medians = {who: statistics.median(times) for who, times in seconds.items()}
    for who, median in medians.items():
        times = seconds[who]
        against = [f"{medians[other] / median:.1f} x {other}" for other in medians if other.startswith(PEER)]
        print(
            f"  {who:32} {median:6.2f} s of CPU ({min(times):.2f} to {max(times):.2f}), "
            f"{len(trace) / median:8,.0f} req/s; {', '.join([ended[who], *([] if who.startswith(PEER) else against)])}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["ar", "azure"], help="ar, azure")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peer; default this one")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    try:
        found = subprocess.run([given.peer_python, "-c", "import dynamo._core"], capture_output=True, check=False)
        missing = found.returncode != 0
    except OSError:
        missing = True
    if missing:
        print(
            f"{given.peer_python} has no {PEER}: python -m venv peer && peer/bin/pip install --no-deps "
            f"{' '.join(PACKAGES)}, then --peer-python peer/bin/python",
            file=sys.stderr,
        )
        sys.exit(2)
    if "ar" in given.which:
        lengths = synth("poisson", 1.0, lengths="normal:512,256", num_requests=20_000)
        compare("512±256 tokens in and out at 1 req/s", lengths, 1, given.peer_python, given.runs)
    if "azure" in given.which:
        compare("Azure conversation", load_trace("azure-conv"), 2, given.peer_python, given.runs)


if __name__ == "__main__":
    main()
