"""Split or not, in a plan: both fleets, which is cheaper, and the file of the split one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsim import plan as dsim_plan
from dsim.planner.split_plan import Side, SplitOrNot
from dsim.report.split import sentence
from dsim.results.fleet_file import FleetWords
from dsim.traces import load

from ..cli.command import dsim

WHOLE = Side((), (5,), 5, 10.0, {"ttft": 548.0, "norm_latency": 15.7}, (0.98,))
SPLIT = Side(("prefill:1@p,q", "decode:3@p,q"), (1, 3), 4, 8.0, {"ttft": 755.0, "norm_latency": 9.9}, (0.3, 0.99))
FOUND = SplitOrNot(("450GB/s,10us",), "jsq", "always", WHOLE, SPLIT)


def said(found: SplitOrNot) -> str:
    return sentence({"split": found.to_json(), "priced": True, "currency": "USD"})


def test_the_cheaper_fleet_is_the_answer_and_the_pools_say_why() -> None:
    assert FOUND.pays
    assert said(FOUND).startswith(
        "Split: replicas 1 + 3 (4 GPUs, 8.00 USD an hour) split, 5 GPUs, 10.00 USD an hour not"
    )
    same = replace(FOUND, split=replace(SPLIT, gpus=5, per_hour=10.0))
    assert not same.pays
    assert said(same).startswith(
        "Not split: replicas 1 + 3 (5 GPUs, 10.00 USD an hour) split, 5 GPUs, 10.00 USD an hour not split. Both cost "
        "the same, and then the fleet that is not split is recommended. ttft p90"
    )
    assert "Both cost" not in said(replace(FOUND, split=replace(SPLIT, gpus=6, per_hour=12.0)))
    assert "the pools are busy for 30 % and 99 % of their time" in said(same)
    none = replace(FOUND, split=None)
    assert not none.pays
    assert said(none) == (
        "Not split: no split fleet for less than twice 5 GPUs, 10.00 USD an hour surely meets the SLOs."
    )
    assert said(replace(none, refused="pool decode: no")) == "Not split: pool decode: no."


def test_the_fleets_file_is_read_as_the_same_fleet(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FOUND.fleet_toml())
    words = FleetWords.read(tmp_path / "fleet.toml")
    assert (words.pools, words.links, words.router) == (SPLIT.pools, FOUND.links, "jsq")


@pytest.mark.slow
def test_a_plan_with_a_link_finds_the_cheapest_split_fleet(tmp_path: Path) -> None:
    trace, out = tmp_path / "some.csv", tmp_path / "plan"
    load("azure-conv").head(120).to_frame().to_csv(trace, index=False)
    asked = ["plan", str(trace), "--rate", "8", "--policy", "lmdeploy-bd32", "--profile", "h100-sdar-8b", "--as-given"]
    asked += ["--num-requests", "120", "--slo", "ttft=2s", "--attainment", "90%", "--max-replicas", "4"]
    done = dsim(*asked, "--link", "450GB/s,10us", "--jobs", "1", "-o", str(out))
    assert done.code == 0, done.err
    found = json.loads((out / "plan.json").read_text())["split"]
    assert found["refused"] == ""
    assert found["split"]["replicas"][0] == 1
    assert found["pays"] == (found["split"]["gpus"] < found["whole"]["gpus"])
    assert found["fleet_toml"] == (out / "fleet.toml").read_text()
    assert "Split or not" in (out / "report.html").read_text()
    assert ("Split: " if found["pays"] else "Not split: ") in done.out
    planned = dsim_plan(
        str(trace), ["ttft=2s"], rate=8, policies=["lmdeploy-bd32"], profiles=["h100-sdar-8b"], as_given=True,
        num_requests=120, attainment=0.9, max_replicas=4, links=["450GB/s,10us"], jobs=1,
    )  # fmt: skip
    assert planned.split is not None
    assert json.loads(json.dumps(planned.to_json()["split"])) == found
    replayed = dsim("replay", str(trace), "--rate", "8", "--fleet", str(out / "fleet.toml"), "--slo", "ttft=2s")
    assert replayed.code == 0, replayed.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--pool", "1@h100-sdar-8b,ar"], "pool is 1@h100-sdar-8b,ar and no link is given"),
        (["--decider", "never"], "decider is never and no link is given"),
        (["--link", "450GB/s", "--pool", "1@h100-sdar-8b,ar"], "expected 2 or more pools, or none"),
        (["--link", "fast"], "is not a bandwidth"),
    ],
)
def test_half_a_split_is_refused_before_anything_is_replayed(given: list[str], message: str) -> None:
    done = dsim("plan", "azure-conv", "--rate", "8", "--slo", "ttft=2s", *given)
    assert done.code == 2
    assert message in done.err
