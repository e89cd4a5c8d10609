"""P90 of latency at Optimus's published capacities, by how requests differ: `python benchmarks/spread.py`.

Published (arXiv 2605.24832, section 7: SDAR-8B, ShareGPT, one A100): 2.60 req/s of whole blocks, 5.54 of chunks of 8
and 5.06 of elastic ones, each with P90 at 50 ms a token. profiler/calibrate.py's PAIR, mean yield and P90 over P50 of
requests' steps a token, gives the twin 50 ms at all three.
"""

import argparse
import tempfile
from pathlib import Path

from dsim.profiler.calibrate import PAIR
from dsim.results.scenario import Scenario

PUBLISHED = (("lmdeploy-bd32", 2.60), ("chunk:8", 5.54), ("optimus", 5.06))
TRIED = (PAIR, (2.28, 1.25), (2.28, 2.0), (2.28, 3.0), (2.8, 2.0), (4.31, 1.3))  # mean, P90 over P50


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--num-requests", type=int, default=600)
    asked.add_argument("--seeds", type=int, default=1)
    options = asked.parse_args()
    print("| mean yield, P90 over P50 | " + " | ".join(f"`{policy}` at {rate:g}" for policy, rate in PUBLISHED) + " |")
    print("|---|" + "---|" * len(PUBLISHED))
    with tempfile.TemporaryDirectory() as folder:
        for mean, tail in TRIED:
            table = Path(folder) / f"{mean}-{tail}.csv"
            table.write_text(f"threshold,yield,p90_over_p50\n0.9,{mean},{tail}\n", encoding="utf-8")
            cells = [
                sum(_p90(policy, rate, str(table), seed, options.num_requests) for seed in range(options.seeds))
                for policy, rate in PUBLISHED
            ]
            print(
                f"| {mean:g}, {tail:g} | " + " | ".join(f"{c / options.seeds:.0f} ms" for c in cells) + " |", flush=True
            )


def _p90(policy: str, rate: float, yields: str, seed: int, num: int) -> float:
    """ms a token."""
    asked = Scenario(
        "azure-conv", policy=policy, profile="a100-sdar-8b", lengths="sharegpt", arrival="poisson", rate=rate,
        num_requests=num, seed=seed, yields=yields,
    )  # fmt: skip
    return float(asked.run().norm_latency_ms.p90)


if __name__ == "__main__":
    main()
