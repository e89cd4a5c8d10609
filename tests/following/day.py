"""A constructed day of a followed server, whose answers are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsim.benchmarks.follow import SERVERS
from dsim.following.alarms import Alarm
from dsim.following.follower import Followed, Follower
from dsim.following.outlook import Advice, WhatIf
from dsim.following.refit import Factors, Version
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
        "begin": end - 300, "end": end, "replicas": 2, "requests": 300 * rate, "drawn": True,
        "extrapolating": False, "residuals": {"step_time": [smooth, 0.01]}, "smooth": {"step_time": smooth},
        "deviations": {"step_time": 0.05}, "bands": {},
        "traffic": {"rate": rate, "input_length": 100.0, "output_length": 50.0},
        "gauges": {"running": 3.0, "waiting": 1.0, "kv_usage": 0.5},
        "measured": {"e2el": 2.0 * slow}, "predicted": {"e2el": 2.0}, "slos": {"ttft=1s": [[0.9, 0.95], [0.97, 0.97]]},
        "raised": [], "settled": [], "alarms": {}, "version": 1, "usual": {}, "errors": {},
        "capacity": CAPACITY,
        "what_if": [vars(w) for w in whatifs(0.98, 0.9, 1.0)],
        "advice": vars(Advice("Do nothing.", "it is well", evidence="73 replays")),
    }  # fmt: skip


def a_day(folder: Path) -> Follower:
    """A server as its twin says, and for the last twelve hours 50 % slower under twice the traffic."""
    own = replace(SERVERS["sglang"].world, slos=("ttft=1s",))
    found = Follower(Followed(own, ("twin",), attainment=0.95), folder)
    for step in range(26 * 12, -1, -1):
        late = step < 12 * 12
        found.windows.append(window(step / 12, 2.0 if late else 1.0, 1.5 if late else 1.0, 0.15 if late else 0.0))
    alarm = Alarm("prices", NOW - HOUR, "step_time", 0.15)
    found.windows[-13]["raised"] = [alarm.to_json()]
    found.windows[-1]["alarms"] = {"prices": alarm.to_json()}
    found.alarms.open["prices"] = alarm
    begin, end = NOW - 3 * HOUR, NOW - 2 * HOUR
    factors = Factors(price=1.5)
    found.versions.append(Version(1, end, begin, 6, "prices: up", factors, {}, "p.json"))
    found.last = Scrape(NOW, (Sample(NOW, "sglang", 1, {}, {"running": 3.0, "waiting": 1.0}),))
    found._capacity = CAPACITY
    return found
