"""docs/prefix*.md show what benchmarks/prefix.py prints, name its commands, and quote the trace's own reuse."""

from pathlib import Path

from dsim.sim.routers import longest_prefix as router

from .test_engines_page import script

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("prefix.md", "prefix-results.md"))


def test_every_table_that_the_script_prints_is_there_with_its_command() -> None:
    for name in script("prefix").ANSWERS:
        assert f"`python benchmarks/prefix.py {name}`" in PAGE


def test_one_pool_without_end_finds_what_the_page_says() -> None:
    trace = script("prefix").requests()
    seen: set[tuple[int, ...]] = set()
    found = 0
    for ids, length in zip(trace.extras["hash_ids"], trace.input_length.tolist(), strict=True):
        beginnings = [tuple(ids[: k + 1]) for k in range(len(ids))]
        repeated = next((k for k, beginning in enumerate(beginnings) if beginning not in seen), len(ids))
        found += min(512 * repeated, length - 1) // 16 * 16
        seen.update(beginnings)
    total = int(trace.input_length.sum())
    assert f"One pool without end would find {100 * found / total:.1f} %" in PAGE
    assert f"{len(trace):,} fit" in PAGE
    assert f"prompts of {total / len(trace):,.0f} tokens" in " ".join(PAGE.split())


def test_thresholds_are_as_they_are() -> None:
    for value in (router.CACHE_THRESHOLD, router.BALANCE_ABS_THRESHOLD, router.BALANCE_REL_THRESHOLD):
        assert f" {value} " in PAGE
