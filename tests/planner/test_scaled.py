"""Fixed or scaled: the fewest fixed replicas, each scaler next to them, and what is replayed again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError
from dsim.planner.memo import Memo
from dsim.planner.scaled import Comparison, Scaled, compare_scalers
from dsim.results.scenario import Scenario
from dsim.traces import load

from ..cli.command import dsim

TRAFFIC = Scenario("azure-conv", rate=16, num_requests=400, slos=("ttft=1s", "norm_latency=60ms"), router="jsq")


def test_the_fewest_fixed_replicas_meet_the_goal_and_every_fleet_begins_with_them() -> None:
    found = compare_scalers(TRAFFIC, ["schedule,at=0/2", "hpa,target=9,every=5"], goal=0.9, startup=5)
    fewer = replace(TRAFFIC, replicas=found.fixed.replicas - 1).run()
    assert fewer.slo_attainment < 0.9 <= found.fixed.attainment
    assert {one.replicas for one in found.scaled} == {found.fixed.replicas}
    by_schedule, by_load = found.scaled
    assert by_schedule.gpu_hours < found.fixed.gpu_hours
    assert by_schedule.attainment < 0.9
    assert by_load.scaler.startswith("hpa")
    own = replace(TRAFFIC, replicas=found.fixed.replicas, scaler="hpa,target=9,every=5", startup=5)
    assert by_load.attainment == own.run().slo_attainment


def test_a_comparison_is_replayed_again_only_for_another_scaler_or_start_up(tmp_path: Path) -> None:
    memo = Memo()
    memo.open(tmp_path / "replays")

    def replays(scalers: list[str], startup: float) -> int:
        before = memo.num_replays - memo.num_stored
        compare_scalers(TRAFFIC, scalers, goal=0.9, startup=startup, memo=memo)
        return memo.num_replays - memo.num_stored - before

    assert replays(["hpa,target=9"], 5) > 1
    assert replays(["hpa,target=9"], 5) == 0
    assert replays(["hpa,target=8"], 5) == 1
    assert replays(["hpa,target=9"], 6) == 1


def test_the_best_meets_the_goal_for_the_fewest_gpu_hours_and_is_no_oracle() -> None:
    def one(scaler: str, attainment: float, hours: float) -> Scaled:
        return Scaled(scaler, 4, attainment, attainment, hours, 0, 0, 0, 0.0)

    fixed = one("fixed", 0.96, 10)
    found = Comparison(0.95, fixed, (one("hpa", 0.94, 5), one("wva-v2", 0.95, 8), one("oracle,load=1", 0.99, 4)))
    assert found.best.scaler == "wva-v2"
    assert Comparison(0.95, fixed, (one("hpa", 0.94, 5),)).best is fixed


@pytest.mark.parametrize(
    ("slos", "most", "message"),
    [
        (("p90:ttft=1s",), 4, "SLOs are p90:ttft=1s, expected one of each request, as ttft=2s"),
        (("ttft=1ms",), 2, "2 replicas meet the SLOs for 0.0% of requests, expected 99.0%"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_both_values(slos: tuple[str, ...], most: int, message: str) -> None:
    with pytest.raises(DsimError) as error:
        compare_scalers(replace(TRAFFIC, slos=slos), [], most=most)
    assert message in str(error.value)


def test_a_plan_replays_its_best_setting_with_each_scaler(tmp_path: Path) -> None:
    trace = tmp_path / "some.csv"
    load("azure-conv").head(300).to_frame().to_csv(trace, index=False)
    asked = ["plan", str(trace), "--rate", "8", "--policy", "optimus", "--as-given", "--num-requests", "300", "--slo"]
    asked += ["ttft=2s", "--attainment", "90%", "--max-replicas", "8", "--scalers", "--startup", "load=20+-2"]
    done = dsim(*asked, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["scalers"]
    names = [row["scaler"].partition(",")[0] for row in found["rows"]]
    assert names[0] == "fixed"
    assert names[-1] == "oracle"
    assert {"hpa", "dynamo-load", "dynamo-throughput", "wva-v2", "queued-forwards"} < set(names)
    assert found["rows"][0]["attainment"] >= 0.9
    refused = dsim(*asked[:-3], "--startup", "5")
    assert refused.code == 2
    assert "startup is 5.0 and scalers are not asked for, expected both or none" in refused.err
