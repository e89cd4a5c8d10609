"""Policies from outside in replay, tune, sweep and quality, and the functions of `import dsim`."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsim
from dsim.engine.allowed_code import allowed
from dsim.engine.errors import PolicyError
from dsim.engine.part import Scheduler
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.policies.whole_block import FixedBlock
from dsim.engine.spec import PRESETS, parse
from dsim.planner.candidate import Candidate
from dsim.planner.quality import quality_of
from dsim.planner.space import space_of
from dsim.report.page import Table
from dsim.results.world import World, named_code

from ..checks import cases, refused

ROOT = Path(__file__).parents[2]
NUMPY, COMPILED, COMBINED = (
    f"{ROOT / 'examples' / 'policies' / name}.py:POLICY" for name in ("numpy_rule", "compiled_rule", "combination")
)
ALLOWED = named_code([NUMPY, COMPILED, COMBINED])
WORLD = World("azure-conv", allow_code=ALLOWED)


@cases("lane", "uncompiled", pytest.param("compiled", marks=pytest.mark.slow))
def test_the_two_ways_to_write_a_rule_serve_alike_and_runs_read_back(lane: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(lane)
    how: dict[str, Any] = {"slos": ["ttft=2s"], "num_requests": 4, "arrival": "poisson", "rate": 4.0, "seed": 3}
    compiled = dsim.replay("azure-conv", COMPILED, **how).columns[COMPILED]
    request.getfixturevalue("uncompiled")
    plain, combined = dsim.replay("azure-conv", [NUMPY, COMBINED], **how, out="run").columns.values()
    for name, column in plain.items():
        assert np.array_equal(column, compiled[name], equal_nan=column.dtype.kind == "f"), name
    assert not np.array_equal(plain["finish"], combined["finish"])
    # A fresh engine goes by the policies that the folder names.
    from tests.cli.command import dsim as command

    code = [word for spec in (NUMPY, COMBINED) for word in ("--allow-code", spec.removesuffix(":POLICY"))]
    ran = command("compare", Path("run"), Path("run"), "--json", *code)
    assert (ran.code, ran.err) == (0, "")


def test_a_space_names_the_fields_of_a_policy_from_outside() -> None:
    space = space_of(WORLD, {"policy": ["optimus", COMPILED], "max_batch": [16, 64], COMPILED: {"calm": [2, 4]}})
    assert space.of(COMPILED) == {"max_batch": (16, 64), "calm": (2, 4)}
    assert space.of("optimus") == {"max_batch": (16, 64)}
    also = space_of(WORLD, also=(COMPILED,))
    assert also.presets == (*space_of(WORLD).presets, COMPILED)
    candidate = also.candidate(COMPILED, {"max_chunk": 16, "calm": 4})
    assert candidate == Candidate.at(WORLD, {"policy": f"{COMPILED}:4,max_chunk=16"})
    assert candidate.columns == {f"{COMPILED}.max_chunk": "16", f"{COMPILED}.calm": "4"}


def test_a_space_with_a_file_that_is_not_there_is_one_line() -> None:
    with refused(r"none\.py cannot be read", PolicyError):
        space_of(replace(WORLD, allow_code=allowed(["none.py"])), {"policy": ["./none.py:POLICY"]})


def test_a_world_takes_its_policy_file_along_to_another_folder() -> None:
    shutil.copy(COMPILED.removesuffix(":POLICY"), "mine.py")
    located = World("azure-conv", "./mine.py:POLICY:4,max_chunk=16").located()
    assert located.policy == str(Path.cwd() / "mine.py:POLICY:4,max_chunk=16")


@dataclass(frozen=True)
class OtherBlock(FixedBlock):
    """A rule that nobody scored."""


@dataclass(frozen=True)
class Eager(Continuous):
    """A scheduler that changes when, and not what."""


def test_quality_is_known_of_what_changes_when_and_unknown_of_what_nobody_scored() -> None:
    full = parse("lmdeploy-bd32")
    assert quality_of(replace(full, batching=Eager()), "SDAR-8B").relative == 1.0
    assert quality_of(replace(full, granularity=OtherBlock()), "SDAR-8B").relative is None
    assert quality_of(parse(COMPILED, ALLOWED), "SDAR-8B").relative is None
    # A combination of the full cache's parts is the full cache, whoever wrote it.
    assert quality_of(replace(full, name="./mine.py:POLICY"), "SDAR-8B").relative == 1.0


def test_one_preset_of_each_family_is_the_reference() -> None:
    held = [(name, p.policy.family == "full-sequence") for name, p in PRESETS.items() if p.reference]
    assert held == [("lmdeploy-bd32", False), ("vanilla", True), ("vllm-diffusion", False)]
    assert isinstance(PRESETS["vanilla"].policy.batching, Scheduler)


def test_the_functions_take_objects_as_well_as_names() -> None:
    named = dsim.replay("azure-conv", "ar", num_requests=20)
    trace, profile = dsim.load_trace("azure-conv"), dsim.load_profile(World.profile)
    given = dsim.replay(trace, dsim.parse_policy("ar"), profile=profile, num_requests=20)
    assert given.to_json() == named.to_json()


def test_a_result_shows_the_reports_rows_in_a_notebook_and_at_a_prompt() -> None:
    done = dsim.replay("azure-conv", ["ar", "ar,max_batch=4"], num_requests=20)
    text = repr(done)
    tables = [block for section in done.page().sections for block in section.blocks if isinstance(block, Table)]
    assert sum(len(table.rows) for table in tables) > 10
    for row in (row for table in tables for row in table.rows):
        assert re.search(rf"^ *{re.escape(row.cells[0])} .*{re.escape(row.cells[-1])}$", text, re.MULTILINE)
    swept = dsim.sweep({"base": {"trace": "azure-conv", "num_requests": 20, "policy": "ar"}, "grid": {"rate": [1, 2]}})
    assert repr(swept).splitlines()[0].startswith("Highest stable output")
    assert swept._repr_html_() == f"<pre>{swept}</pre>"
