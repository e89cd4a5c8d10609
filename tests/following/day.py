"""A constructed day of a followed server, whose answers are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsim.benchmarks.follow_changes import SERVERS
from dsim.following.alarms import Alarm
from dsim.following.follower import Followed, Follower
from dsim.following.outlook import Advice, WhatIf
from dsim.following.sources.sample import Sample
from dsim.following.windows import Scrape

NOW, HOUR = 1.8e9, 3600.0
CAPACITY = 3.0  # req/s


def whatifs(*met: float) -> list[WhatIf]:
    fleets = (("as it is", 2), ("a replica less", 1), ("a replica more", 3))
    return [WhatIf(name, n, share, 1.0) for (name, n), share in zip(fleets, met, strict=True)]


def window(hours_ago: float, rate: float, slow: float, smooth: float) -> dict[str, Any]:
    end = NOW - hours_ago * HOUR
    return {
        "begin": end - 300,
        "end": end,
        "replicas": 2,
        "requests": 300 * rate,
        "extrapolating": False,
        "residuals": {"step_time": [smooth, 0.01]},
        "smooth": {"step_time": smooth},
        "deviations": {"step_time": 0.05},
        "traffic": {"rate": rate, "input_length": 100.0, "output_length": 50.0},
        "gauges": {"running": 3.0, "waiting": 1.0, "kv_usage": 0.5},
        "measured": {"e2el": 2.0 * slow},
        "predicted": {"e2el": 2.0},
        "slos": {"ttft=1s": [[0.9, 0.95], [0.97, 0.97]]},
        "raised": [],
        "alarms": {},
        "what_if": [vars(outcome) for outcome in whatifs(0.98, 0.9, 1.0)],
        "advice": vars(Advice("Do nothing.", "it is well")),
    }


def a_day(folder: Path) -> Follower:
    """A server as its twin says, and for the last twelve hours 50 % slower under twice the traffic."""
    world = replace(SERVERS["sglang"].world, slos=("ttft=1s",))
    follower = Follower(Followed(world, ("twin",), attainment=0.95), folder)
    for step in range(26 * 12, -1, -1):
        late = step < 12 * 12
        follower.windows.append(window(step / 12, 1.0 + late, 1.0 + late / 2, 0.15 * late))
    alarm = Alarm.of("prices", NOW - HOUR, "step_time", 0.15)
    follower.windows[-25]["adopted"] = {
        "version": 1, "begin": NOW - 3 * HOUR, "windows": 6, "words": "price x 1.500", "reason": "prices: up",
    }  # fmt: skip
    follower.windows[-13]["raised"] = [vars(alarm)]
    follower.windows[-1]["alarms"] = {"prices": vars(alarm)}
    follower.alarms.open["prices"] = alarm
    follower.last = Scrape(NOW, (Sample(NOW, "sglang", 1, {}, {"running": 3.0, "waiting": 1.0}),))
    follower._capacity = CAPACITY
    return follower
