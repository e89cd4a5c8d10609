"""Sweeps: the cells that a configuration makes, and a journal and tables that survive any end."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dsim.engine.errors import DsimError, MachineError
from dsim.planner.backend import Pool
from dsim.planner.grid import TYPES, read_plan
from dsim.planner.sweep import sweep
from dsim.results.fleet_file import FleetWords
from dsim.results.metrics import Summary
from dsim.results.world import World, on_fleet
from dsim.traces import Trace

from ..checks import cases, refused
from ..stored import rows

BASE = {"trace": "azure-conv", "num_requests": 40, "policy": "chunk"}


def cells(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(cell.varied) for cell in read_plan(config).cells]


def write(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def test_a_grid_is_every_combination_the_last_field_fastest() -> None:
    assert cells({"base": BASE, "grid": {"policy": ["ar", "optimus"], "rate": [1, 2.5], "replicas": [1]}}) == [
        {"policy": "ar", "rate": 1.0, "replicas": 1},
        {"policy": "ar", "rate": 2.5, "replicas": 1},
        {"policy": "optimus", "rate": 1.0, "replicas": 1},
        {"policy": "optimus", "rate": 2.5, "replicas": 1},
    ]


def test_equal_cells_run_once_and_take_the_rest_from_the_base() -> None:
    assert cells({"base": BASE | {"replicas": 2}, "grid": {"rate": [1.0, 1]}}) == [{"rate": 1.0}]


def test_policy_fields_are_appended_to_the_spec() -> None:
    grid = {"policy": ["chunk", "optimus"], "policy.num_blocks": [2, 1]}
    config = {"base": BASE | {"policy.threshold": 0.9}, "grid": grid}
    assert [cell.world.policy for cell in read_plan(config).cells] == [
        "chunk,threshold=0.9,num_blocks=2",
        "chunk,threshold=0.9,num_blocks=1",
        "optimus,threshold=0.9,num_blocks=2",
        "optimus,threshold=0.9,num_blocks=1",
    ]


def test_toml_may_leave_the_quotes_of_a_policy_field_out() -> None:
    text = '[base]\ntrace = "azure-conv"\npolicy = "chunk"\n[grid]\npolicy.chunk = [2, 4]\nrate = [1]\n'
    plan = read_plan(write("c.toml", text))
    assert (plan.title, plan.varied) == ("c", ("policy.chunk", "rate"))
    assert [cell.world.policy for cell in plan.cells] == ["chunk,chunk=2", "chunk,chunk=4"]


def test_slos_and_nothing_are_values_too() -> None:
    grid = {"slos": [["ttft=2s"], ["ttft=1s", "e2el=9s"]], "workload": ["none", "gsm8k"]}
    plan = read_plan({"base": BASE, "grid": grid})
    assert [(c.world.slos, c.world.workload) for c in plan.cells] == [
        (("ttft=2s",), None), (("ttft=2s",), "gsm8k"),
        (("ttft=1s", "e2el=9s"), None), (("ttft=1s", "e2el=9s"), "gsm8k"),
    ]  # fmt: skip
    assert plan.cells[2].varied == {"slos": "ttft=1s, e2el=9s", "workload": None}


def test_files_are_looked_for_beside_the_configuration() -> None:
    Path("there").mkdir()
    trace = write("there/t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    policy = write("there/p.toml", 'policy = "chunk"\nchunk = 4\n')
    config = write("there/c.toml", '[base]\ntrace = "t.jsonl"\npolicy = "p.toml"\n[grid]\nseed = [1]\n')
    (cell,) = read_plan(config).cells
    assert (cell.world.trace, cell.world.policy) == (str(trace.resolve()), str(policy.resolve()))
    with refused(r"policy is the file .*p.toml and policy.chunk=4 is given"):
        read_plan({"base": BASE, "grid": {"policy": [str(policy)], "policy.chunk": [4]}})


@cases(
    "config message",
    ({"base": BASE}, "config: there is nothing to vary, expected fields in [grid]"),
    ({"base": BASE, "gird": {}}, "config: gird is unknown (did you mean grid?), expected keys"),
    ({"base": BASE | {"chunk": 4}, "grid": {"rate": [1]}},
     "config: base.chunk: there is no field 'chunk'; there are "),
    ({"base": BASE, "grid": {"slos": [["ttft=2"]]}},
     "config: grid.slos: SLO 'ttft=2': bound is '2', expected a time above zero"),
    ({"grid": {"rate": [1]}}, "config: cell 1 (rate=1.0): there is no trace, expected one in"),
    ({"base": BASE, "grid": {"router": ["jsq", "best"]}},
     "config: cell 2 (router=best): router is 'best', expected one of"),
    ({"base": BASE, "grid": {"policy": ["optimos"]}},
     "config: cell 1 (policy=optimos): policy 'optimos': no preset"),
    ({"base": BASE | {"rate": 1.0}, "grid": {"concurrency": [4]}},
     "config: cell 1 (concurrency=4): concurrency is 4: a closed loop"),
    ({"base": BASE | {"decode.max_batch": 2}, "grid": {"seed": [0]}},
     "config: cell 1 (seed=0): decode.max_batch is 2, expected fields of policy only"),
)  # fmt: skip
def test_a_mistake_is_one_line_before_any_work(config: dict[str, Any], message: str) -> None:
    with refused() as error:
        sweep(config, "out")
    assert str(error.value).startswith(message)
    assert not Path("out").exists()


def test_the_document_s_examples_are_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    plan = read_plan(write("c.toml", text.split("```toml\n")[1].split("```")[0]))
    assert [(cell.world.policy, cell.world.rate) for cell in plan.cells] == [
        (f"{policy},threshold=0.9", rate) for policy in ("chunk", "optimus") for rate in (1.0, 2.0, 4.0)
    ]
    assert [name for name in TYPES if f"`{name}`" not in text] == []


def test_the_table_holds_what_each_world_says() -> None:
    done = sweep({"base": BASE | {"slos": ["ttft=2s", "p90:itl=1300ms"]}, "grid": {"rate": [1, 2]}}, "out")
    assert list(done.to_frame()["rate"]) == [1.0, 2.0]
    for rate, (_, row) in zip((1.0, 2.0), done.to_frame().iterrows(), strict=True):
        slos = ("ttft=2s", "p90:itl=1300ms")
        alone: Summary = World("azure-conv", num_requests=40, policy="chunk", rate=rate, slos=slos).run()
        assert (row["goodput"], row["ttft_ms_p90"]) == (alone.goodput, alone.ttft_ms.p90)
        assert (row["batch_mean"], row["ttft=2s attainment"]) == (alone.batch.mean, alone.slos[0].attainment)
        assert (row["p90:itl=1300ms observed_ms"], row["p90:itl=1300ms met"]) == (alone.slos[1].observed_ms, rate == 1)
        assert row["stable"] == alone.stable
    assert not {"ttft=2s met", "ttft=2s observed_ms", "policy"} & set(done.to_frame())
    text = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [float(row["goodput"]) for row in text] == list(done.to_frame()["goodput"])
    assert [row["stable"] for row in text] == ["true", "true"]
    assert list(text[0]) == list(done.to_frame())


def test_a_finished_cell_is_not_run_again_and_a_new_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ran = World.run, []

    def run(world: World, requests: Trace | None = None) -> Summary:
        if requests is None:  # not one of the page
            ran.append(world.rate)
        return plain(world, requests)

    monkeypatch.setattr(World, "run", run)
    first = sweep({"base": BASE, "grid": {"rate": [1, 2]}}, "out", jobs=1)
    again = sweep({"base": BASE, "grid": {"rate": [1, 2]}}, "out", jobs=1)
    assert (ran, again.num_run, again.num_reused) == ([1.0, 2.0], 0, 2)
    pd.testing.assert_frame_equal(first.to_frame(), again.to_frame())
    # A changed configuration keeps what it shares, in its own order.
    more = sweep({"base": BASE, "grid": {"rate": [3, 2]}}, "out", jobs=1)
    assert (ran, more.num_run, more.num_reused) == ([1.0, 2.0, 3.0], 1, 1)
    assert list(more.to_frame()["rate"]) == [3.0, 2.0]
    forced = sweep({"base": BASE, "grid": {"rate": [1]}}, "out", jobs=1, force=True)
    assert (ran, forced.num_run) == ([1.0, 2.0, 3.0, 1.0], 1)
    assert len([row for row in rows(Path("out/replays.db"), "answer") if '"kv_pages"' in row[0]]) == 1


def test_a_failed_cell_is_a_row_and_only_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"base": BASE, "grid": {"rate": [1, 2, 3]}}

    plain = World.run

    def run(world: World, requests: Trace | None = None) -> Summary:
        if requests is not None:  # of the page
            return plain(world, requests)
        ran.append(world.rate)
        if world.rate == 1:
            raise DsimError("none of its 40 requests fits")
        if world.rate == 2:
            raise MemoryError("no room\nleft")
        return plain(world)

    ran: list[float | None] = []
    monkeypatch.setattr(World, "run", run)
    done = sweep(config, "out", jobs=1)
    assert list(done.to_frame()["error"])[:2] == ["none of its 40 requests fits", "MemoryError: no room left"]
    assert done.to_frame()["error"].isna().tolist() == [False, False, True]
    assert done.to_frame()["goodput"].isna().all()
    assert np.isnan(done.to_frame()["ttft_ms_p50"][0])
    assert done.num_failed == 2
    page = Path("out/report.html").read_text()
    assert "MemoryError: no room left" in page
    assert "2 of 3 cells" in page
    assert sweep(config, "out", jobs=1).num_reused == 2
    assert ran == [1.0, 2.0, 3.0, 2.0]


def test_an_unreachable_cluster_leaves_the_folder_as_it_was() -> None:
    config = {"base": BASE, "grid": {"rate": [1]}}
    sweep(config, "out", jobs=1)
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    for out, force in ((Path("out"), True), (Path("new"), False)):
        with refused(r"ray is 127.0.0.2:1, expected HOST:PORT of a running Ray cluster"):
            sweep(config, out, ray="127.0.0.2:1", force=force)
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert not Path("new").exists()


def test_a_backend_that_gives_up_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"base": BASE, "grid": {"rate": [1, 2, 3]}}
    plain = Pool.run

    def gives_up(*arguments: Any) -> Iterator[Any]:
        yield next(plain(*arguments))
        raise MachineError("the memory is full")

    monkeypatch.setattr(Pool, "run", gives_up)
    with refused(kind=MachineError):
        sweep(config, "out", jobs=1)
    monkeypatch.undo()
    assert sweep(config, "out", jobs=1).num_reused == 1


def test_an_interrupt_ends_a_sweep_with_what_is_done() -> None:
    config = {"base": BASE, "grid": {"rate": [1, 2, 3]}}

    def stop(finished: int, total: int) -> None:
        if finished == 2:
            raise KeyboardInterrupt

    done = sweep(config, "out", jobs=1, progress=stop)
    assert done.interrupted
    assert list(done.to_frame()["rate"]) == [1.0, 2.0]
    assert "INTERRUPTED" in Path("out/report.html").read_text()
    assert json.loads(Path("out/sweep.json").read_text())["interrupted"]
    rest = sweep(config, "out", jobs=1)
    assert (rest.num_run, rest.num_reused, rest.interrupted) == (1, 2, False)
    assert not json.loads(Path("out/sweep.json").read_text())["interrupted"]


def page_of(config: dict[str, Any]) -> str:
    sweep({"base": BASE} | config, "out", jobs=1)
    return Path("out/report.html").read_text()


def test_a_numeric_field_makes_curves_and_others_points() -> None:
    page = page_of({"grid": {"rate": [1, 2], "policy.chunk": [4, 8], "router": ["jsq", "round-robin"]}})
    assert page.count('id="curve-output_throughput"') == 1
    assert "Estimated, not measured." in page
    page = page_of({"grid": {"rate": [1, 2], "policy": ["ar", "chunk"], "seed": [0, 1]}})
    assert 'id="curve-ttft_ms_p90"' in page
    assert page.count("of the best cell") == 3  # of the four numbers; the last is how many cells there are
    assert "0 overloaded, 0 failed" in page
    page = page_of({"grid": {"policy": ["ar", "chunk"]}})
    assert 'id="curve-ttft_ms_p90"' in page


def test_an_overloaded_cell_is_marked() -> None:
    page = page_of({"base": BASE | {"num_requests": 400}, "grid": {"rate": [1, 40]}})
    assert "1 of 2 cells, marked" in page
    assert page.count("✕ overloaded") == 1
    assert '"x-thin"' in page


SPLIT = ("prefill:1@h100-sdar-8b,lmdeploy-bd32", "decode:1@h100-sdar-8b,lmdeploy-bd32")


@pytest.mark.slow
def test_a_cell_on_a_fleet_s_file_is_the_replay_of_that_fleet() -> None:
    pools = "pools = ['1@h100-sdar-8b,lmdeploy-bd32', '1@a100-sdar-8b,lmdeploy-bd32']\n"
    fleets = [
        write(f"{name}.toml", pools + more)
        for name, more in (("mixed", "router = 'jsq'"), ("split", "links = ['450GB/s,10us']"))
    ]
    base = "[base]\ntrace = 'azure-conv'\nnum_requests = 60\n[grid]\nfleet = ['mixed.toml', 'split.toml']"
    config = write("sweep.toml", base)
    done = sweep(config, "out", jobs=1)
    assert done.to_frame()["fleet"].tolist() == ["mixed.toml", "split.toml"]
    alone = [on_fleet([World("azure-conv", num_requests=60)], FleetWords.read(path))[0] for path in fleets]
    assert done.to_frame()["e2el_ms_mean"].tolist() == [world.run().e2el_ms.mean for world in alone]
    write(fleets[0], pools + "router = 'round-robin'")  # another content is another cell
    assert sweep(config, "out", jobs=1).num_reused == 1


@cases(
    "field message",
    ("'decode.max_batch' = 2", "decode.max_batch is 2, expected fields of policy only, and none with a fleet's file"),
    # The file is the whole fleet.
    ("policy = 'ar'", "split.toml and policy is .*, expected the file alone"),
    ("replicas = 2", "split.toml and replicas is .*, expected the file alone"),
    ("policy.threshold = 0.9", "split.toml and policy.threshold is .*, expected the file alone"),
    ("router = 'jsq'", "split.toml and router is .*, expected the file alone"),
)
def test_a_field_that_the_file_sets_is_refused(field: str, message: str) -> None:
    write("split.toml", f"pools = {list(SPLIT)}\nlinks = ['450GB/s,10us']\n")
    base = ("[base]", "trace = 'azure-conv'", "num_requests = 60", "fleet = 'split.toml'", field)
    with refused(message):
        sweep(write("sweep.toml", "\n".join([*base, "[grid]", "seed = [0, 1]"])))
