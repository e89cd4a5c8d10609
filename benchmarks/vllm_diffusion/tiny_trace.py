"""The traces of a case of the diffusion benchmark, in the order in which they are sent.

    python -m dsim.benchmarks.vllm_diffusion.tiny_trace FOLDER --rates 0.4,0.8 --count N --lengths L
        [--steps LEAST,MOST] [--shared N]

Each load is measured twice, with calibration traffic before either. Prints NAME=FILE for each trace. A request draws
its own `diffusion_max_steps`; with --shared N its prompt begins with one of four prefixes of N tokens. No two traces
share a prefix.
"""

import argparse
import json
import random
from pathlib import Path

from dsim.traces import Trace, synth
from dsim.traces.canonical import BLOCK, with_hash_ids

BURST = 20.0  # req/s
PREFIXES = 4


def lines_of(trace: Trace, name: str, steps: list[int] | None, shared: int, draw: random.Random) -> list[str]:
    """The trace's lines for vLLM's load generator: Mooncake's keys and `diffusion_max_steps`."""
    found = []
    for i, ids in enumerate(with_hash_ids(trace).extras["hash_ids"]):
        line = {
            "timestamp": round(1e3 * float(trace.arrival[i])), "input_length": int(trace.input_length[i]),
            "output_length": int(trace.output_length[i]), "hash_ids": [f"{name}-{one}" for one in ids],
            "block_size": BLOCK,
        }  # fmt: skip
        if steps:
            line["diffusion_max_steps"] = draw.randint(*steps)
        if shared:
            blocks, prefix = shared // BLOCK, draw.randrange(PREFIXES)
            line["hash_ids"] = [f"{name}-prefix{prefix}-{one}" for one in range(blocks)] + line["hash_ids"]
            line["input_length"] += blocks * BLOCK
        found.append(json.dumps(line) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rates", required=True, help="req/s")
    parser.add_argument("--count", type=int, required=True, help="requests of a load; calibration has a quarter of it")
    parser.add_argument("--lengths", required=True, help="as `dsim trace synth` has it")
    parser.add_argument("--steps", help="LEAST,MOST; none: the sampler decides")
    parser.add_argument("--shared", type=int, default=0, help="tokens")
    args = parser.parse_args()
    rates, seed = args.rates.split(","), 100
    steps = [int(x) for x in args.steps.split(",")] if args.steps else None
    for half, run in (("a", "measured"), ("b", "again")):
        sent = []
        for rate in [*rates, "burst"]:
            seed += 1
            sent.append((f"calibration-{rate}{half}", BURST if rate == "burst" else float(rate), seed, args.count // 4))
        sent += [(f"{run}-{rate}", float(rate), 0, args.count) for rate in rates]
        for name, rate, its_seed, num in sent:
            trace = synth("poisson", rate, lengths=args.lengths, num_requests=num, seed=its_seed)
            path = args.folder / f"{name}.jsonl"
            path.write_text("".join(lines_of(trace, name, steps, args.shared, random.Random(its_seed))))
            print(f"{name}={path}")


if __name__ == "__main__":
    main()
