"""Published beside simulated: the runs that the A100 profiles are calibrated to. `python benchmarks/calibration.py`"""

from dsim.engine.policy import parse
from dsim.profiler.profile import Profile, load
from dsim.report.metrics import summarize
from dsim.sim.twin import simulate
from dsim.traces import Trace, synth

# FOCUS, Fig. 6, baseline, ShareGPT, B=32: tok/s at each concurrency.
PUBLISHED = {
    "a100-sdar-8b": {32: 838, 64: 913, 128: 938, 256: 979},
    "a100-llada2-mini": {64: 1770, 128: 2067, 256: 2181},
}


def harness(concurrency: int) -> str:
    """LMDeploy as FOCUS's benchmark ran it."""
    return f"lmdeploy-bd32,max_batch={concurrency},max_prefill_tokens={32 * concurrency}"


def closed_loop(profile: Profile, trace: Trace, concurrency: int) -> float:
    """Output tokens per second of the whole run, prefill included."""
    run = simulate(
        trace, profile, parse(harness(concurrency)), concurrency=concurrency, workload="sharegpt-focus", seed=1
    )
    return summarize("", run.table.columns, run.totals, closed_loop=True).output_throughput


def decode_throughput(profile: Profile, policy: str, batch: int) -> float:
    """Returned tokens per second of decode steps alone, `batch` equal requests at once (Optimus, Figs 1-3)."""
    trace = synth("constant", 1.0, lengths="fixed:213,321", num_requests=batch)
    run = simulate(trace, profile, parse(policy), concurrency=batch, workload="sharegpt", seed=1)
    return float(run.table["num_tokens"].sum()) / run.totals.decode_time


def decode_ratios(profile: Profile) -> dict[str, float]:
    """The ratios that Optimus publishes for an 8B model on an A100."""
    block = {b: decode_throughput(profile, harness(b), b) for b in (16, 256, 512)}
    ar = {b: decode_throughput(profile, f"ar,max_batch={b},max_prefill_tokens={32 * b}", b) for b in (16, 512)}
    return {
        "B=32 / AR at batch 16": block[16] / ar[16],
        "AR / B=32 at batch 512": ar[512] / block[512],
        "B=32 at batch 16 / at batch 256": block[16] / block[256],
    }


def prompts() -> Trace:
    """The harness's 5,000 prompts, as lognormal lengths of ShareGPT's moments."""
    return synth("constant", 1.0, lengths="sharegpt", num_requests=5000, seed=3)


def main() -> None:
    """Print the table."""
    trace = prompts()
    for name, published in PUBLISHED.items():
        profile = load(name)
        for concurrency, target in published.items():
            got = closed_loop(profile, trace, concurrency)
            beside = f"published {target:5} tok/s, twin {got:6.0f} ({got / target - 1:+.1%})"
            print(f"{name:17} concurrency {concurrency:3}: {beside}")
    for ratio, value in decode_ratios(load("a100-sdar-8b")).items():
        print(f"a100-sdar-8b      {ratio}: {value:.2f}")


if __name__ == "__main__":
    main()
