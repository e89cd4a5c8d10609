"""Recorded pages of vLLM 0.32 on a busy CPU (benchmarks/follow_vllm.sh), replayed through `dsim follow`'s path.

Of each kind the traffic grows by half, and then a limit of the scheduler is another: set in mid-run, or by a flag of an
engine that is started again. The autoregressive profile failed its own checks, for the machine was busy.
"""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.follow_vllm import ZERO, Pages, follow, ways
from dsim.results.scenario import Scenario

RECORDED = Path(__file__).parent / "recorded"
TRAFFIC, LIMIT, WINDOW = 420.0, 660.0, 30.0  # s
POLICY = "vllm-ar,max_num_seqs=16,max_num_batched_tokens=512,async_scheduling=false"


def recorded(kind: str) -> dict[str, Pages]:
    """The two ways to go on."""
    found: dict[str, Pages] = {"first": [], "flag": []}
    for line in lzma.decompress((RECORDED / f"{kind}.pages.jsonl.xz").read_bytes()).splitlines():
        page = json.loads(line)
        found[page["of"]].append((page["time"], page["page"]))
    return ways(found["first"], found["flag"], LIMIT)


def alarms(records: list[dict[str, Any]]) -> list[tuple[float, str, str]]:
    return [(r["end"] - ZERO, a["cause"], a["quantity"]) for r in records for a in r["raised"]]


@pytest.mark.parametrize(("way", "quantity"), [("limit", "ttft"), ("flag", "waiting")])
def test_traffic_and_a_limit_of_the_scheduler_are_named_and_nothing_else(
    tmp_path: Path, way: str, quantity: str
) -> None:
    """The limit: max_num_batched_tokens 16 in place of 512. The flag: --max-num-seqs 4 in place of 16."""
    scenario = Scenario(trace="", policy=POLICY, profile=str(RECORDED / "autoregressive.json"))
    records = list(follow(recorded("autoregressive")[way], scenario, tmp_path, WINDOW))
    traffic, rule = alarms(records)
    assert traffic[1:] == ("traffic", "rate")
    assert TRAFFIC < traffic[0] <= TRAFFIC + 3 * WINDOW
    assert rule[1:] == ("rule", quantity)
    assert LIMIT < rule[0] <= LIMIT + 5 * WINDOW  # the engine that starts again takes a minute, and a window to run in
    unmeasured = [record["unmeasured"] for record in records]
    assert unmeasured[0].startswith("noise: repeats of a step spread by 18.5%")
    assert unmeasured[-1] is None  # windows have measured the prices
