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
# FOCUS itself there, threshold 0.8 and alpha 1.5; and positions computed beyond the second layer a token returned.
PUBLISHED_FOCUS = {32: 1218, 64: 1850, 128: 2160, 256: 2272}
PUBLISHED_COMPUTED = 3.12


def harness(concurrency: int, policy: str = "lmdeploy-bd32") -> str:
    """LMDeploy as FOCUS's benchmark ran it."""
    return f"{policy},max_batch={concurrency},max_prefill_tokens={32 * concurrency}"


def closed_loop(profile: Profile, trace: Trace, concurrency: int, policy: str = "lmdeploy-bd32") -> tuple[float, float]:
    """Output tokens per second of the whole run, prefill included, and positions computed a token returned."""
    spec = parse(harness(concurrency, policy))
    run = simulate(trace, profile, spec, concurrency=concurrency, workload="sharegpt-focus", seed=1)
    computed = (run.totals.tokens - run.totals.evicted) / int(run.table["num_tokens"].sum())
    return summarize("", run.table.columns, run.totals, closed_loop=True).output_throughput, computed


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
            got, _ = closed_loop(profile, trace, concurrency)
            beside = f"published {target:5} tok/s, twin {got:6.0f} ({got / target - 1:+.1%})"
            print(f"{name:17} concurrency {concurrency:3}: {beside}")
    sdar = load("a100-sdar-8b")
    for concurrency, target in PUBLISHED_FOCUS.items():
        got, computed = closed_loop(sdar, trace, concurrency, "focus,threshold=0.8")
        beside = f"published {target:5} tok/s, twin {got:6.0f} ({got / target - 1:+.1%})"
        more = f"; computed a token: published {PUBLISHED_COMPUTED}, twin {computed:.2f}"
        print(f"FOCUS at 0.8      concurrency {concurrency:3}: {beside}{more}")
    for concurrency in PUBLISHED_FOCUS:
        plain, cached, evicting = (
            closed_loop(sdar, trace, concurrency, policy) for policy in ("lmdeploy-bd32", "delayed-cache-plus", "focus")
        )
        gains = f"DC+ {cached[0] / plain[0]:.2f}, FOCUS {evicting[0] / plain[0]:.2f} times the baseline (predicted)"
        computed = f"{plain[1]:.2f}, {cached[1]:.2f}, {evicting[1]:.2f}"
        print(f"all at 0.9        concurrency {concurrency:3}: {gains}; computed a token: {computed}")
    for ratio, value in decode_ratios(load("a100-sdar-8b")).items():
        print(f"a100-sdar-8b      {ratio}: {value:.2f}")


if __name__ == "__main__":
    main()
