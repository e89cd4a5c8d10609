"""SLOs of a class of requests, wherever SLOs are given: replay, sweep, tune and capacity judge the class alone."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.planner.objective import traffic
from dsim.results.world import World
from dsim.traces import synth, write

from .command import dsim, succeed

# Every second request is chat's and short; batch's are long and slow.
NUM = 200
TUNE = "tune two.csv --space space.toml --trials 2"


@pytest.fixture(autouse=True)
def _files() -> None:
    even = np.arange(NUM) % 2 == 0
    trace = synth("poisson", 4.0, num_requests=NUM, seed=1)
    trace = replace(
        trace, output_length=np.where(even, 32, 256), extras={"slo_class": ["chat" if e else "batch" for e in even]}
    )
    write(trace, "two.csv")


def test_replay_judges_each_class_by_its_own_bound() -> None:
    asked = "--slo chat/e2el=3s --slo batch/90%:e2el=3s --slo chat/mean:e2el=3s"
    ran = dsim("replay two.csv", asked, "--json -o run")
    # The shares whose e2el is within 3 s, counted in the twin's own columns.
    columns = World("two.csv").simulate().table.columns
    fast = columns["finish"] - columns["arrival"] <= 3.0
    chat, batch = (float(fast[k::2].mean()) for k in (0, 1))
    assert chat > batch + 0.2
    [policy] = ran.json["policies"]
    assert [v["slo"] for v in policy["slos"]] == asked.split()[1::2]
    assert (policy["slos"][0]["attainment"], policy["slos"][1]["attainment"]) == (chat, batch)
    assert [v["met"] for v in policy["slos"]] == [None, False, True]
    # What no SLO on requests judges, batch's, is good when it completes.
    assert policy["slo_attainment"] == pytest.approx((chat + 1) / 2)
    assert "chat/e2el=3s" in Path("run/report.html").read_text()


@pytest.mark.slow
def test_tune_searches_by_the_class() -> None:
    Path("space.toml").write_text('policy = ["lmdeploy-bd32", "optimus"]\n')
    ran = succeed(TUNE, "--slo chat/e2el=3s --slo batch/p90:e2el=60s -o tuned --json")
    assert ran.json["setup"]["slos"] == ["chat/e2el=3s", "batch/p90:e2el=60s"]
    # The search's own figure is the attainment of chat's, with all of batch's good, times the rate.
    with Path("tuned/trials.csv").open() as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    world = World("two.csv", slos=("chat/e2el=3s",))
    requests = traffic(world, False)
    columns = world.simulate(requests).table.columns
    slow = columns["finish"] - columns["arrival"] > 3.0
    chat = np.array(requests.extras["slo_class"]) == "chat"
    assert float(rows["optimus"]["value"]) == pytest.approx((1 - float((slow & chat).mean())) * requests.rate)
    missed = dsim(TUNE, "--slo batch/p90:e2el=1ms")
    assert missed.refusal.startswith("no setting of 2 trials meets batch/p90:e2el=1ms; the closest, ")
