"""Recorded pages of vLLM 0.32 on a busy CPU (benchmarks/follow_vllm.sh), replayed through `dsim follow`'s path.

Of each kind the traffic grows by half, and then a limit of the scheduler is another: set in mid-run, or by a flag of an
engine that is started again. The profiles failed their own checks, for the machine was busy.
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsim.benchmarks.follow_vllm import ZERO, Pages, follow, ways
from dsim.results.world import World

from ..checks import cases

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Kind:
    """What was recorded: the settings, when traffic and limit changed, and windows (s)."""

    policy: str
    traffic: float
    limit: float
    window: float


KINDS = {
    "autoregressive": Kind(
        "vllm-ar,max_num_seqs=16,max_num_batched_tokens=512,async_scheduling=false", 420.0, 660.0, 30.0
    ),
    "diffusion": Kind(
        "vllm-diffusion,max_num_batched_tokens=1024,async_scheduling=false,page_size=128,num_pages=16383,canvas_length=64",
        216.0, 360.0, 25.0,
    ),
}  # fmt: skip


def recorded(kind: str) -> dict[str, Pages]:
    """The two ways to go on."""
    found: dict[str, Pages] = {"first": [], "flag": []}
    for line in lzma.decompress((RECORDED / f"{kind}.pages.jsonl.xz").read_bytes()).splitlines():
        page = json.loads(line)
        found[page["of"]].append((page["time"], page["page"]))
    return ways(found["first"], found["flag"], KINDS[kind].limit)


@pytest.mark.slow
@cases(
    "kind way quantity windows",
    ("autoregressive", "limit", "ttft", 5), ("autoregressive", "flag", "waiting", 5),
    ("diffusion", "limit", "running", 4), ("diffusion", "flag", "running", 8),
)  # fmt: skip
def test_traffic_and_a_limit_of_the_scheduler_are_named_and_nothing_else(
    tmp_path: Path, kind: str, way: str, quantity: str, windows: int
) -> None:
    """max_num_batched_tokens 16 in place of 512, or 64 of 1,024; --max-num-seqs 4 in place of 16, or 1 of 8."""
    own = KINDS[kind]
    world = World(trace="", policy=own.policy, profile=str(RECORDED / f"{kind}.json"))
    records = follow(recorded(kind)[way], world, tmp_path, own.window)
    traffic, rule = [(r["end"] - ZERO, a["cause"], a["quantity"]) for r in records for a in r["raised"]]
    assert traffic[1:] == ("traffic", "rate")
    assert own.traffic < traffic[0] <= own.traffic + 4 * own.window
    assert rule[1:] == ("rule", quantity)
    # The engine that starts again takes a minute, and a window to run in.
    assert own.limit < rule[0] <= own.limit + windows * own.window
