"""Published beside simulated: single-stream runs of full-sequence models. `python benchmarks/full_sequence.py`

Sparse-dLLM's Table 1: LLaDA-8B on an RTX 4090 with 48 GB, one request at a time, blocks of 32, a token a step. Nothing
is fitted to these figures but the launch floor of the profile, which is Sparse-dLLM's reuse step. Fast-dLLM's and
dLLM-Cache's codes have another: they are shown with both.
"""

from dataclasses import replace

from dsim.engine.policy import parse
from dsim.profiler.profile import Profile, load
from dsim.sim.twin import simulate
from dsim.traces import synth

# Tokens of prompt and output, as the peak memory of the plain runs implies; 256 of them are output, of HumanEval 512.
LENGTHS = {"MMLU": 863, "ARC-C": 354, "PIQA": 339, "GPQA": 1316, "GSM8K": 1769, "MATH": 990, "HumanEval": 651}
TOKENS_PER_SECOND = {
    "vanilla": (9.48, 21.08, 21.74, 6.30, 4.57, 8.52, 12.53),
    "dllm-cache:50": (21.43, 24.03, 23.64, 19.68, 18.03, 21.11, 21.64),
    "fast-dllm": (20.51, 21.63, 21.99, 19.82, 19.11, 20.72, 21.50),
    "sparse-dllm": (31.89, 36.85, 37.05, 28.82, 26.45, 31.72, 34.39),
}
OTHER_LAUNCH = 0.046  # s: a reuse step of Fast-dLLM, 45.4 to 47.0 ms whatever the length


def throughput(profile: Profile, policy: str, benchmark: str) -> float:
    """Output tokens per second of one request at a time."""
    output = 512 if benchmark == "HumanEval" else 256
    trace = synth("constant", 0.001, lengths=f"fixed:{LENGTHS[benchmark] - output},{output}", num_requests=1)
    run = simulate(trace, profile, parse(policy))
    return output / run.totals.decode_time


def main() -> None:
    """Print the table."""
    profile = load("rtx4090-48gb-llada-8b")
    slower = replace(profile, latency=replace(profile.latency, launch=OTHER_LAUNCH))
    for policy, published in TOKENS_PER_SECOND.items():
        for benchmark, target in zip(LENGTHS, published, strict=True):
            line = f"{policy:14} {benchmark:10} {target:6.2f} tok/s published"
            for name, device in (("", profile), (" at a floor of 46 ms", slower)):
                if not name or policy in ("dllm-cache:50", "fast-dllm"):
                    got = throughput(device, policy, benchmark)
                    line += f", {got:6.2f} predicted{name} ({got / target - 1:+.0%})"
            print(line)


if __name__ == "__main__":
    main()
