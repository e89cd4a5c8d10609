"""Recorded pages of vLLM 0.32 on a CPU (benchmarks/follow_vllm.sh), replayed through `dsim follow`'s path.

The traffic grows by half at second 568; from second 918 on the engine runs with `--max-num-seqs 1`.
"""

import json
import lzma
from pathlib import Path

from dsim.benchmarks.follow_vllm import ZERO, follow
from dsim.results.scenario import Scenario

RECORDED = Path(__file__).parent / "recorded"
POLICY = "vllm-ar,max_num_seqs=16,max_num_batched_tokens=512,async_scheduling=false"
UNTIL = 850.0  # s


def test_recorded_pages_raise_the_alarms_that_they_raised_when_they_were_recorded(tmp_path: Path) -> None:
    lines = lzma.decompress((RECORDED / "vllm.pages.jsonl.xz").read_bytes()).splitlines()
    pages = [(found["time"], found["page"]) for found in map(json.loads, lines) if found["time"] < ZERO + UNTIL]
    scenario = Scenario(trace="", policy=POLICY, profile=str(RECORDED / "vllm.json"))
    records = list(follow(pages, scenario, tmp_path, 40.0))
    raised = [(round(record["end"] - ZERO), alarm["cause"]) for record in records for alarm in record["raised"]]
    # The first is of the profile, whose calibration was disturbed: the machine was busy. The refit takes it away.
    assert raised == [(120, "prices"), (840, "traffic")]
    assert [record["version"] for record in records][-1] == 1
