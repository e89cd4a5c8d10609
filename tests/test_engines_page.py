"""The pages of engines and prefixes, and their evidence, name presets, fields and thresholds as they are."""

import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from dsim.engine.policies import SHIPPED
from dsim.engine.spec import PRESETS, settings_of
from dsim.planner.candidate import spelt
from dsim.sim.routers import longest_prefix as router

from .checks import cases
from .worlds import ENGINE_PRESETS

ROOT = Path(__file__).parents[1]
DOCS, EVIDENCE = ROOT / "docs", ROOT / "research" / "evidence"
PAGE = "".join(path.read_text() for path in (DOCS / "engines.md", *sorted((DOCS / "engines").glob("*.md"))))
ANSWERS = "".join(path.read_text() for path in sorted(EVIDENCE.glob("engine-answers*.md")))
PREFIXES = "".join(path.read_text() for path in (DOCS / "prefix.md", EVIDENCE / "prefix-results.md"))


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(found)  # dataclasses look themselves up there
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    return script("published_engines")


def settings_on_the_page() -> list[tuple[str, str, str]]:
    """(preset, field, value) of every row of the tables of settings."""
    found = []
    for section in PAGE.split("\n## `")[1:]:
        preset = section.split("`")[0]
        for row in re.findall(r"^\| .* \| `(\w+)` \| .* \| `([^`]*)`[^|]*\|$", section.split("\n## ")[0], re.M):
            found.append((preset, *row))
    return found


def test_a_preset_has_the_fields_and_the_values_that_its_table_says() -> None:
    rows = settings_on_the_page()
    assert len(rows) >= 40
    for preset, field, said in rows:
        settings = settings_of(PRESETS[preset].policy)
        assert field in settings, (preset, field)
        assert said == spelt(settings[field]), (preset, field)


def test_every_setting_of_an_engine_s_scheduler_is_in_a_table() -> None:
    on_page = {(preset, field) for preset, field, _ in settings_on_the_page()}
    for name in SHIPPED:
        presets = import_module(f"dsim.engine.policies.{name}").PRESETS
        told = {field for preset, field in on_page if preset in presets}
        for preset in set(ENGINE_PRESETS) & presets.keys():
            assert set(PRESETS[preset].policy.batching.__dataclass_fields__) <= told, preset
    for preset in ("vllm-ar", "vllm-diffusion", "sglang-gemma"):
        for field in PRESETS[preset].policy.granularity.__dataclass_fields__:
            assert (preset, field) in on_page


def test_the_rows_of_an_80_gb_card_are_the_page_s(engines: ModuleType) -> None:
    bf16, fp8 = engines.bf16_on_80gb(), engines.load(engines.FP8)
    most = [engines.rows_that_fit(profile, 2048) for profile in (bf16, fp8, engines.tiled(bf16), engines.tiled(fp8))]
    assert "**{} rows in bf16, {} in FP8,".format(*most) in ANSWERS
    assert "room for {} and {} rows of 2,048".format(*most[2:]) in ANSWERS


@pytest.mark.slow
def test_calibrated_profiles_give_the_runs_that_they_are_calibrated_to_and_fdfo_over_sync(engines: ModuleType) -> None:
    rows = engines.calibrated()
    assert len(rows) == 18
    assert all(abs(row.error) < 0.035 for row in rows)
    assert (rows[-1].run, rows[-1].error) == ("the same over sync, 128 x 64/256", pytest.approx(0, abs=0.005))
    for row in rows:
        assert f"| {' | '.join(row.cells())} |" in ANSWERS


def test_every_table_that_a_script_prints_has_a_section_with_its_command(engines: ModuleType) -> None:
    for name in engines.ANSWERS:
        assert f"`python benchmarks/published_engines.py {name}`" in ANSWERS
    for name in script("prefix_gain").ANSWERS:
        assert f"`python benchmarks/prefix_gain.py {name}`" in PREFIXES


@cases("name", "lmdeploy-0.18", "vllm-diffusion")
def test_a_picture_is_drawn_again_byte_for_byte(name: str) -> None:
    pictures = script("engine_pictures")
    drawn = pictures.picture(pictures.WORLDS[name])
    assert drawn == (ROOT / "docs" / "images" / f"engine-{name}.svg").read_text()
    assert f"images/engine-{name}.svg" in PAGE


def test_one_pool_without_end_finds_what_the_page_says() -> None:
    trace = script("prefix_gain").requests()
    seen: set[tuple[int, ...]] = set()
    found = 0
    for ids, length in zip(trace.extras["hash_ids"], trace.input_length.tolist(), strict=True):
        beginnings = [tuple(ids[: k + 1]) for k in range(len(ids))]
        repeated = next((k for k, beginning in enumerate(beginnings) if beginning not in seen), len(ids))
        found += min(512 * repeated, length - 1) // 16 * 16
        seen.update(beginnings)
    total = int(trace.input_length.sum())
    assert f"One pool without end would find {100 * found / total:.1f} %" in PREFIXES
    assert f"{len(trace):,} fit" in PREFIXES
    assert f"prompts of {total / len(trace):,.0f} tokens" in " ".join(PREFIXES.split())


def test_thresholds_of_the_prefix_router_are_as_they_are() -> None:
    for value in (router.CACHE_THRESHOLD, router.BALANCE_ABS_THRESHOLD, router.BALANCE_REL_THRESHOLD):
        assert f" {value} " in PREFIXES
