"""dsim compare, from arguments to what is printed, written and refused."""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.profiler.profile import load, save

from .command import dsim, held, rows, succeed

SLOWER = "--profile slower.json"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `a`, and `b` with every step a twentieth slower."""
    folder = tmp_path_factory.mktemp("recorded")
    base = load("a100-sdar-8b")
    policies = "--policy chunk:8 --policy ar"
    with contextlib.chdir(folder):
        Path("small.jsonl").write_text(rows(12, gap=1400))
        save(replace(base, name="slower", latency=base.latency.scaled(1.05)), "slower.json")
        succeed("replay small.jsonl", policies, "-o a")
        succeed("replay small.jsonl", policies, SLOWER, "-o b")
    return folder


@pytest.fixture(autouse=True)
def _two_runs(recorded: Path) -> None:
    """The two runs in a folder of the test's own."""
    shutil.copytree(recorded, ".", dirs_exist_ok=True)


def test_json_is_one_object_alone() -> None:
    ran = dsim("compare a b --bound e2el=10% --json", SLOWER)
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
    found = ran.json
    assert found["schema"] == "dsim-compare"
    assert [cell["policy"] for cell in found["cells"]] == ["chunk:8", "ar"]
    for cell in found["cells"]:
        part = cell["parts"]["metrics"]["e2el"]
        assert part["latency"] + part["commits"] + part["scheduling"] == pytest.approx(part["error"], abs=1e-12)
        assert cell["metrics"]["e2el"]["requests"]["mape"] == pytest.approx(1 - 1 / 1.05, rel=0.05)
        assert cell["steps"]["decode"]["bias"] == pytest.approx(1 / 1.05 - 1)
    assert [b["met"] for b in found["bounds"]] == [True, True]
    assert found["pairs"][0]["predicted"]["estimated"] is True


@pytest.mark.slow
def test_a_missed_slo_is_a_line_and_exit_1_where_that_is_asked() -> None:
    for slo, code in (("ttft=1000s", 0), ("ttft=1ms", 1), ("p90:ttft=1ms", 1)):
        said = f"replay small.jsonl --policy ar --slo {slo}"
        ran = dsim(said, "-o judged --force --fail-on-slo")
        assert ran.code == code, ran.err
        assert ("ar " in ran.err) == bool(code)
        succeed(said)


def test_a_missed_bound_is_a_line_and_exit_1() -> None:
    ran = dsim("compare a b --bound e2el=1% --bound mean:ttft=50%")
    assert ran.code == 1
    assert [line.split(" has ")[0] for line in ran.err.splitlines()] == ["e2el=1%: chunk:8", "e2el=1%: ar"]
    assert all(line.endswith("%, missed") for line in ran.err.splitlines())


def test_o_writes_a_folder_and_keeps_what_is_there() -> None:
    ran = dsim("compare a b -o out")
    assert (ran.code, ran.err) == (0, "Wrote out/ (compare.json, report.html)\n")
    assert held(Path("out")) == ["compare.json", "report.html"]
    succeed("compare a b -o out --force")
    ran = dsim("compare a b -o a")
    assert ran.err == "Error: a: holds requests.parquet, which is not of a comparison: choose another folder\n"
