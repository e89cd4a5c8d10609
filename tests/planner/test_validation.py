"""Validation: the cells, what is kept of them, and that every part runs on a device that is always there."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsim.comparison.bounds import Bound
from dsim.engine.commits import CommitModel
from dsim.engine.latency import LatencyModel
from dsim.live.config import ModelConfig
from dsim.live.weights import random_model
from dsim.planner.validation import Cell, Validated, affordable, lengthen, load_of, plan_cells, runs_of, validate
from dsim.profiler.measure import Loaded, describe, open_any, shape_of
from dsim.profiler.profile import Profile, load, save
from dsim.research.tiny.saved import save_model
from dsim.results.on_device import LiveSetting
from dsim.results.world import World

from ..checks import refused

SMALL = ModelConfig("small", 2, 48, 4, 2, 16, 80, 97, 256, 4, 96, rope_theta=1e4)
POLICIES = ["lmdeploy-bd32:4,max_batch=4,page_size=8", "chunk:2,block_length=4,max_batch=4,page_size=8"]


def test_a_load_is_of_a_policy_s_own_capacity_or_in_flight_up_to_its_largest_batch(world: tuple[World, Loaded]) -> None:
    capacities, cells = plan_cells(world[0], POLICIES, ["3", "full", "64", "0.5"], 7)
    assert [cell.policy for cell in cells] == POLICIES * 3
    assert [(c.load, c.concurrency, c.num_requests, c.again) for c in cells[::2]] == [
        ("3", 3, 7, True), ("full", 4, 8, False), ("0.5", None, 7, False),
    ]  # fmt: skip
    assert [cell.rate for cell in cells[4:]] == [0.5 * capacities[policy] for policy in POLICIES]
    assert capacities[POLICIES[1]] != capacities[POLICIES[0]] > cells[0].rate
    assert [load_of(load) for load in (0.5, "64", 16, "full")] == ["0.5", "64", "16", "full"]
    for wrong in ("1.5", "inf", "most"):
        with refused(r"--load is .*, expected a share of capacity below 1, a number of requests"):
            load_of(wrong)


def test_the_most_important_runs_share_the_budget_and_a_load_s_policies_get_as_many_requests() -> None:
    a, b = Cell("a", "8", 8, 2.0, 16, True), Cell("b", "8", 8, 4.0, 16, True)
    alone = Cell("chunk:8,num_blocks=2", "0.5", None, 1.0, 30)
    assert alone.name == "chunk_8_num_blocks_2-at-0.5"
    runs = runs_of([a, b, alone])
    assert runs == [(a, "measured"), (b, "measured"), (a, "again"), (b, "again"), (alone, "measured")]
    assert affordable(runs, 21.0) == (runs[:3], 1.0)
    assert affordable(runs, 7.0) == (runs[1:2], 3.0)
    assert [cell.num_requests for cell in lengthen([a, b, alone], 10.0)] == [36, 36, 40]


def profile() -> Profile:
    known = load("a100-sdar-8b")
    latency = LatencyModel(((0.0, 5e-3), (16.0, 6e-3), (64.0, 8e-3)), 1e-4)
    commits = (CommitModel("toy", 4, 0.9, None, (0.7, 0.5, 0.4, 0.3)),)
    return replace(
        known, name="ours", device=describe("cpu"), model=shape_of(SMALL), latency=latency, commits=commits,
        memory=replace(known.memory, vocab=97, kv_bytes_per_token=512),
    )  # fmt: skip


@pytest.fixture
def world() -> tuple[World, Loaded]:
    save_model(random_model(SMALL, "cpu", torch.float32), Path("model"), torch.float32)
    save(profile(), "p.json")
    world = World("azure-conv", profile="p.json", lengths="fixed:12,8", num_requests=40, seed=1)
    return world, open_any("model", "cpu")


def run(world: tuple[World, Loaded], out: str, **how: Any) -> Validated:
    base, loaded = world
    live = LiveSetting(loaded, profile(), "twin")
    return validate(Path(out), base, live, **{"policies": POLICIES, "loads": ["0.3"], "seconds": 0.4} | how)


@pytest.mark.slow
def test_every_cell_is_predicted_measured_compared_and_kept(world: tuple[World, Loaded]) -> None:
    watched = []
    both = {"loads": ["3", "0.3"]}
    found = run(world, "v", **both, watch=lambda cell, _: watched.append(cell) or nullcontext())
    assert watched == [*found.cells[:2], *found.cells]
    assert set(found.capacities) == set(POLICIES)
    assert [cell.policy for cell in found.cells] == [cell.policy for cell in found.comparison.cells] == POLICIES * 2
    assert found.unmeasured == ()
    for cell, compared in zip(found.cells, found.comparison.cells, strict=True):
        assert (compared.unpaired, compared.num_both) == ("", cell.num_requests)
        assert (compared.parts is None) == (cell.load == "3")
    assert found.noise is not None
    assert len([note for note in found.page().notes if note.startswith("Noise floor")]) == 2
    assert Validated.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found

    # A second call measures nothing again.
    written = {path: path.stat().st_mtime_ns for path in Path("v").rglob("*.parquet")}
    assert len(written) == 2 * (4 + 4 + 2)
    again = run(world, "v", **both)
    assert {path: path.stat().st_mtime_ns for path in Path("v").rglob("*.parquet")} == written
    assert again.unmeasured == ()
    assert again.to_json() == found.to_json()
    with refused(r"holds cells of \d+ requests, expected 100 or more for a bound of ttft"):
        run(world, "v", bounds=[Bound.parse("p95:ttft=10%")])
    with refused(r"holds a validation with seed 1, this one has 2"):
        run((replace(world[0], seed=2), world[1]), "v")


@pytest.mark.slow
def test_however_short_the_budget_one_cell_is_measured_and_the_next_call_does_what_was_left(
    world: tuple[World, Loaded],
) -> None:
    found = run(world, "v", within=0.0)
    assert [cell.policy for cell in found.comparison.cells] == POLICIES[:1]
    one, two = (cell.name for cell in found.cells)
    assert (found.noise, set(found.unmeasured)) == (None, {f"{one}/again", f"{two}/measured", f"{two}/again"})
    assert run(world, "v").unmeasured == ()
    with refused(r"at load 0\.3 takes about .* s, and the budget leaves 0 s for any cell: "):
        run(world, "w", seconds=None, within=0.0)


def test_a_folder_of_something_else_is_left_alone(world: tuple[World, Loaded]) -> None:
    Path("v").mkdir()
    Path("v/thesis.txt").write_text("mine")
    with refused(r"holds files and no validation.json"):
        run(world, "v")
    assert Path("v/thesis.txt").read_text() == "mine"
