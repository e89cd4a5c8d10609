"""The rule of vLLM's scheduler against a recorded run: `python benchmarks/vllm_log.py FOLDER`.

FOLDER: vllm_cpu_steplog.jsonl (steps of one traffic, from inside), vllm_bench_detailed.json (another's latencies, by
its client) and vllm_bench_trace.jsonl. A profile is fitted to the steps, and the other traffic replayed at its sending
times under `ar` and `vllm-ar`. The time between client and engine is in neither, so ttft is compared less its median
difference.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsim.engine.spec import parse
from dsim.profiler.steplog import profile_of_log, read_log
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import load

VLLM = "vllm-ar,max_num_seqs=32,max_num_batched_tokens=1024,page_size=128,num_pages=2730"


def main(folder: Path) -> None:
    log = folder / "vllm_cpu_steplog.jsonl"
    profile = profile_of_log(read_log(log), "vllm-cpu", log.name)
    run = json.loads((folder / "vllm_bench_detailed.json").read_text())
    ttft, e2el = np.array(run["ttfts"]), np.array(run["latencies"])
    sent = np.maximum.accumulate(np.array(run["start_times"]) - run["start_times"][0])
    trace = replace(load(folder / "vllm_bench_trace.jsonl"), arrival=sent)
    print(f"{len(trace)} requests; measured mean ttft {ttft.mean():.3f} s, e2el {e2el.mean():.3f} s")
    for spec in ("ar:32", VLLM, f"{VLLM},async_scheduling=false"):
        table = simulate(trace, Setting(parse(spec), profile)).table
        first, last = table["first_emission"] - sent, table["finish"] - sent
        outside = float(np.median(ttft - first))
        after, measured = last - first, e2el - ttft
        mean, mape = after.mean() / measured.mean() - 1, np.abs(after / measured - 1).mean()
        print(
            f"{spec:108} ttft MAPE {100 * np.abs((first + outside) / ttft - 1).mean():4.1f} % "
            f"({1e3 * outside:.0f} ms outside the engine), first to last token mean {100 * mean:+5.1f} %, "
            f"MAPE {100 * mape:4.1f} %"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
