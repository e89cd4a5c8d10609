"""Fixed or scaled: the fewest fixed replicas, each scaler next to them, and what is replayed again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsim import plan as dsim_plan
from dsim.engine.errors import DsimError
from dsim.planner.memo import Memo
from dsim.planner.scaled import LOADS, Comparison, Scaled, compare_scalers
from dsim.results.scenario import Scenario
from dsim.traces import load

from ..cli.command import dsim

TRAFFIC = Scenario("azure-conv", rate=16, num_requests=400, slos=("ttft=1s", "norm_latency=60ms"), router="jsq")


def test_the_fewest_fixed_replicas_meet_the_goal_and_every_fleet_begins_with_them() -> None:
    found = compare_scalers(TRAFFIC, ["schedule,at=0/2", "hpa,target=9,every=5", "oracle"], goal=0.9, startup=5)
    fewer = replace(TRAFFIC, replicas=found.fixed.replicas - 1).run()
    assert fewer.slo_attainment < 0.9 <= found.fixed.attainment
    assert {one.replicas for one in found.scaled} == {found.fixed.replicas}
    by_schedule, by_load, _ = found.scaled
    assert by_schedule.gpu_hours < found.fixed.gpu_hours
    assert by_schedule.attainment < 0.9
    assert by_load.scaler.startswith("hpa")
    own = replace(TRAFFIC, replicas=found.fixed.replicas, scaler="hpa,target=9,every=5", startup=5)
    assert by_load.attainment == own.run().slo_attainment
    assert found.arrivals == (400,)  # they come within 25 s
    assert by_load.intervals == (by_load.attainment,)
    assert by_load.changes[0][0] == 0
    assert max(ready for _, ready, _ in by_load.changes) > 1


def test_the_oracle_is_shown_at_the_highest_load_that_meets_the_goal() -> None:
    found = compare_scalers(TRAFFIC, [], goal=0.7)
    [oracle] = found.scaled
    assert oracle.attainment >= 0.7
    if (load := LOADS.index(float(oracle.scaler.split(",")[1].removeprefix("load=")))) + 1 < len(LOADS):
        spec = f"oracle,load={LOADS[load + 1]},most=64"
        assert replace(TRAFFIC, replicas=found.fixed.replicas, scaler=spec).run().slo_attainment < 0.7


@pytest.mark.parametrize("guess", [2, 64])
def test_a_guess_changes_no_answer(guess: int) -> None:
    found = compare_scalers(TRAFFIC, ["oracle"], goal=0.9, guess=guess)
    assert found == compare_scalers(TRAFFIC, ["oracle"], goal=0.9)


def test_a_comparison_is_replayed_again_only_for_another_scaler_or_start_up(tmp_path: Path) -> None:
    memo = Memo()
    memo.open(tmp_path / "replays")

    def replays(scalers: list[str], startup: float) -> int:
        before = memo.num_replays - memo.num_stored
        compare_scalers(TRAFFIC, [*scalers, "oracle"], goal=0.9, startup=startup, memo=memo)
        return memo.num_replays - memo.num_stored - before

    assert replays(["hpa,target=9"], 5) > 1
    assert replays(["hpa,target=9"], 5) == 0
    assert replays(["hpa,target=8"], 5) == 1
    assert replays(["hpa,target=9"], 6) == 2


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
    trace, out = tmp_path / "some.csv", tmp_path / "plan"
    load("azure-conv").head(300).to_frame().to_csv(trace, index=False)
    asked = ["plan", str(trace), "--rate", "0.3", "--policy", "optimus", "--as-given", "--num-requests", "300", "--slo"]
    asked += ["ttft=2s", "--attainment", "90%", "--max-replicas", "8", "--scalers", "--startup", "load=20+-2"]
    done = dsim(*asked, "-o", str(out))
    assert done.code == 0, done.err
    assert "FIXED OR SCALED" in done.out.upper()
    found = json.loads((out / "plan.json").read_text())["scalers"]
    page = (out / "report.html").read_text()
    names = [row["scaler"].partition(",")[0] for row in found["rows"]]
    assert names[0] == "fixed"
    assert names[-1] == "oracle"
    assert {"hpa", "dynamo-load", "dynamo-throughput", "wva-v2", "queued-forwards"} < set(names)
    assert found["rows"][0]["attainment"] >= 0.9
    assert sum(found["arrivals"]) == 300
    assert "Replicas under the rate of arrivals" in page
    assert "Attainment of each 15 minutes" in page
    said = dsim_plan(
        str(trace), ["ttft=2s"], rate=0.3, policies=["optimus"], as_given=True, num_requests=300, attainment=0.9,
        max_replicas=8, scalers=True, startup="load=20+-2", jobs=1,
    )  # fmt: skip
    assert said.scalers is not None
    assert said.to_json()["scalers"] == found
    refused = dsim(*asked[:-3], "--startup", "5")
    assert refused.code == 2
    assert "startup is 5.0 and scalers are not asked for, expected both or none" in refused.err
