"""Searches over fleets of pools: the optimum of a known landscape, the space, the files, and what is refused."""

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import DsimError
from dsim.planner.candidate import Candidate, fields_of, spelt, world_at
from dsim.planner.objective import Part, ReplayOutcome
from dsim.planner.space import Choice, space_of
from dsim.planner.tune import tune
from dsim.results.world import World
from dsim.sim.deciders import DECIDERS

from ..cli.command import Ran, dsim, held, rows
from .test_tune import landscape_of

POOLS = ("prefill:1@h100-sdar-8b,lmdeploy-0.18", "decode:3@h100-sdar-8b,lmdeploy-0.18")
WORLD = World("azure-conv", pools=POOLS, links=("450GB/s,10us",), slos=("ttft=2s",))
SPACE = {
    "prefill": {"replicas": [1, 2, 3], "max_prefill_tokens": [2048, 4096]},
    "decode": {"replicas": [1, 2, 3], "max_batch": [16, 64, 128]},
    "decider": ["always", "uncached,tokens=9000"],
    "link": {"overlap": [False, True]},
}


def known(candidate: Candidate, part: Part) -> ReplayOutcome:
    """Best of all: 2+2 replicas, 64 rows, long prompts moved, layers sent while others are computed."""
    of = {name: spelt(value) for name, value in fields_of(candidate.world).items()}
    points = {"2+2": 4.0, "1+3": 2.0}.get(of["replicas"], 0.0) + {"64": 2.0}.get(of["decode.max_batch"], 0.0)
    points += (
        (of["decider"] != "always") + (of["link.overlap"] == "true") + (of["prefill.max_prefill_tokens"] == "2048")
    )
    return ReplayOutcome((points,))


@pytest.mark.slow
def test_the_best_fleet_of_a_known_landscape_is_found_within_the_budget_and_beats_the_fleet_as_given() -> None:
    with landscape_of(known):
        found = tune(WORLD, space=SPACE, gpus=4, trials=60)
    best = found.recommended
    assert best.pools == (
        "prefill:2@h100-sdar-8b,lmdeploy-0.18,max_prefill_tokens=2048",
        "decode:2@h100-sdar-8b,lmdeploy-0.18,max_batch=64",
    )
    assert (best.decider, best.links) == ("uncached,tokens=9000", ("450GB/s,10us,overlap=true",))
    assert found.confirmed
    assert found.default.policy == (
        "prefill:1@h100-sdar-8b,lmdeploy-0.18 + decode:3@h100-sdar-8b,lmdeploy-0.18, link 450GB/s,10us, decider always"
    )
    assert {trial.replicas for trial in found.trials} <= {"1+1", "1+2", "1+3", "2+1", "2+2", "3+1"}
    assert found.to_frame()["policy"].is_unique


@pytest.mark.parametrize(
    ("gpus", "by_cost", "expected"),
    [
        (None, False, ("1+3", "2+2", "3+1")),
        (5, False, ("1+4", "2+3", "3+2", "4+1")),
        (None, True, ("1+1", "1+2", "1+3", "2+1", "2+2", "3+1")),
    ],
)
def test_by_default_every_split_of_the_budget_is_tried_and_with_a_price_smaller_fleets_too(
    gpus: int | None, by_cost: bool, expected: tuple[str, ...]
) -> None:
    space = space_of(WORLD, gpus=gpus, by_cost=by_cost)
    assert space.dimensions["replicas"] == Choice(expected)
    # What only those that decode do is moved there alone, and blocks stay as long as the other pool's.
    assert {name for name in space.dimensions if name.startswith("prefill.")} == {
        "prefill.max_batch", "prefill.max_prefill_tokens"
    }  # fmt: skip
    assert "decode.max_batch" in space.dimensions
    assert not [name for name in space.dimensions if "block_length" in name]


def test_replicas_of_more_gpus_count_for_all_of_them() -> None:
    pools = ("prefill:1@h200x2-diffusiongemma,sglang-gemma", "decode:1@h200x2-diffusiongemma,sglang-gemma")
    world = replace(WORLD, pools=pools)
    assert world.num_gpus == 4
    assert space_of(world, gpus=5).dimensions["replicas"] == Choice(("1+1",))
    assert space_of(world, gpus=6).dimensions["replicas"] == Choice(("1+2", "2+1"))


def test_a_candidate_is_the_fleet_that_its_values_say_and_says_them_again() -> None:
    space = space_of(WORLD, SPACE, gpus=4)
    values = {
        "replicas": "3+1", "prefill.max_prefill_tokens": 4096, "decode.max_batch": 16, "decider": "always",
        "link.overlap": True,
    }  # fmt: skip
    candidate = space.candidate("", values)
    assert space.values_of(candidate) == values
    assert candidate.replicas == "3+1"
    fleet = candidate.world.fleet().check()
    assert [pool.count for pool in fleet.pools] == [3, 1]
    assert fleet.pools[1].setting.policy.batching.max_batch == 16
    assert fleet.links[0].overlap


def test_a_fields_own_value_in_a_pool_is_kept_where_nothing_moves_it() -> None:
    world = replace(WORLD, pools=(POOLS[0], f"{POOLS[1]},max_batch=24"))
    space = space_of(world, {"decider": ["always", "uncached"]})
    assert space.dimensions.keys() == {"decider"}
    assert world_at(world, {"decider": "uncached"}).pools[1].endswith("lmdeploy-0.18,max_batch=24")


def test_pools_without_a_link_have_no_decider() -> None:
    space = space_of(replace(WORLD, links=()), gpus=5)
    assert "decider" not in space.dimensions
    assert "decider" not in space.candidate("", {}).spec


@pytest.fixture(autouse=True)
def _files(two_replications: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(rows(60, prompt=700))
    Path("space.toml").write_text(
        "[prefill]\nreplicas = [1, 2]\n[decode]\nreplicas = [1, 2]\nmax_batch = [2, 64]\n"
        "[link]\noverlap = [false, true]\n"
    )


def search(*more: object) -> Ran:
    return dsim(
        "tune", "trace.jsonl", "--pool", POOLS[0], "--pool", POOLS[1].replace(":3", ":1"), "--link", "450GB/s,10us",
        "--router", "least-tokens", "--slo", "ttft=900ms", "--trials", 3, *more,
    )  # fmt: skip


@pytest.mark.slow
def test_a_search_ends_in_a_command_and_a_file_that_give_the_same_replay() -> None:
    ran = search("--gpus", 3, "--space", "space.toml", "-o", "tuned")
    assert ran.code == 0
    assert ran.err.endswith("Wrote tuned/ (fleet.toml, tune.json, trials.csv, report.html)\n")
    assert held(Path("tuned")) == ["fleet.toml", "replays.db", "report.html", "trials.csv", "tune.json"]
    info = json.loads(Path("tuned/tune.json").read_text())
    [line] = [line for line in ran.out.splitlines() if "Run it: " in line]
    command = line.partition("Run it: ")[2]
    assert command == info["run"]
    assert "--slo ttft=900ms" in command
    by_words = dsim(*shlex.split(command)[1:], "--json")
    by_file = dsim("replay", "trace.jsonl", "--fleet", "tuned/fleet.toml", "--slo", "ttft=900ms", "--json")
    assert by_words.json["policies"] == by_file.json["policies"]
    with Path("tuned/trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert {"replicas", "decode.max_batch", "link.overlap"} <= table[0].keys()
    assert {row["replicas"] for row in table} <= {"1+1", "1+2", "2+1"}
    again = search("--gpus", 3, "--space", "space.toml", "-o", "tuned")
    assert "from the store" in again.err
    assert json.loads(Path("tuned/tune.json").read_text()) == info
    assert search("--gpus", 4, "--space", "space.toml", "-o", "tuned").refusal.startswith(
        "tuned/replays.db holds another search: its space is"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--gpus", 1], "gpus is 1 and the pools as given have 2, expected at least as many"),
        (["--gpus", 10**9], "gpus is 1000000000, expected at most 4096"),
        (["--policy", "optimus"], f"--pool is {POOLS[0]} and --policy is ['optimus'], expected pools alone"),
        (["--decider", "sometimes"], f"decider is 'sometimes', expected one of {', '.join(DECIDERS)}"),
        (["--ensemble", 2], "ensemble is 2 and the fleet has pools or a scaler, expected one pool of a fixed count"),
    ],
)
def test_what_a_search_over_pools_cannot_be_asked_is_refused(given: list[object], message: str) -> None:
    assert search(*given).refusal == message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"decoder": {}},
            "space: there is no 'decoder' (did you mean decode?), expected prefill, decode, decider, link",
        ),
        ({"decode": {"max_bach": [1]}}, "space: pool decode: [lmdeploy-0.18] has no field 'max_bach'"),
        ({"decode": {"replicas": [0, 1]}}, "space: decode.replicas is [0, 1], expected whole numbers of at least 1"),
        ({"decode": {"replicas": "2"}}, "space: decode.replicas is '2', expected whole numbers of at least 1"),
        ({"decode": 3}, "space: decode is 3, expected a table of fields"),
        ({"link": {"bandwidth": ["1GB/s"]}}, "space: [link] has no field 'bandwidth'; its fields are overlap"),
        ({"link": {"overlap": ["soon"]}}, "space: link '450GB/s,10us,overlap=soon': overlap is 'soon', expected"),
        ({"decode": {"replicas": [9]}}, "no numbers of replicas of the space fit 4 GPUs, expected some that do"),
    ],
)
def test_a_space_that_no_pool_has_is_refused_with_both_values(table: dict[str, Any], message: str) -> None:
    with pytest.raises(DsimError) as refused:
        space_of(WORLD, table, gpus=4)
    assert str(refused.value).startswith(message)


def test_gpus_without_pools_and_a_fleet_that_scales_are_refused() -> None:
    alone = dsim("tune", "trace.jsonl", "--slo", "ttft=2s", "--gpus", 3)
    assert alone.refusal == "gpus is 3 and no pool is given, expected --pool, or replicas in a space file"
    Path("fleet.toml").write_text('pools = ["1@a100-sdar-8b,optimus"]\nscaler = "queued-forwards"\n')
    scaled = dsim("tune", "trace.jsonl", "--slo", "ttft=2s", "--fleet", "fleet.toml")
    assert scaled.refusal == (
        "queued-forwards changes the number of replicas, expected fleets of a fixed count: they are compared"
    )
