"""`dsim profile` prints what it derived, writes the file, and refuses in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.latency import CacheOverhead
from dsim.profiler import measure
from dsim.profiler.profile import Profile, load
from dsim.profiler.samples import FEATURES, samples
from dsim.report.profile_page import Profiled

from ..checks import cases
from ..cli.command import dsim, succeed

EXAMPLE = Path(__file__).parents[2] / "examples" / "steplog.jsonl"


@cases(
    "shape rows family",
    ("DiffusionGemma-26B-A4B", 93, "canvas"),  # rows whose sampler takes half of what the weights leave
    ("LLaDA2.1-mini", 1024, "block-diffusion"),
    ("LLaDA2.1-flash", 1024, "block-diffusion"),
    ("SDAR-30B-A3B", 1024, "block-diffusion"),
)
def test_models_that_engines_serve_have_a_roofline(tmp_path: Path, shape: str, rows: int, family: str) -> None:
    path = tmp_path / "sheet.json"
    found = succeed("profile", "--roofline", "h200", "--model", shape, "--tp", 2, "-o", path, "--json").json
    made = load(path)
    assert (found["sheet"]["max_batch"], made.family) == (rows, family)
    # Experts are read as tokens reach them: the floor of one token is far below that of hundreds.
    assert made.latency.base(256) > 2 * made.latency.base(1)
    assert (made.latency.window, made.latency.window_kv_read > 0) == (
        (1024, True) if family == "canvas" else (0, False)
    )


def test_a_roofline_is_told_and_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    command = ("profile", "--roofline", "h200", "--model", "qwen3-8b", "-o", path)
    assert succeed(*command).out == (
        "Qwen3-8B on H200, captured graphs, from data sheets: estimated, not measured.\n"
        "knee: 182 tokens a step: reading the weights takes as long as multiplying with them\n"
        "floor: 4.9 ms a step of 1 token, set by reading the weights\n"
        "slope: 22 us a token beyond the knee, before attention and LM head\n"
        "memory: weights take 16.4 GB of 151 GB\n"
        "KV pages: 11231 of 64 tokens, at a batch of 1024 and prefills of 4096 tokens\n"
        "commits: none: it can run `ar` only\n"
        "trust: latencies to about ±30%\n"
        "Note: Source: data sheet figures and efficiencies in profiler/hardware.py\n"
        "Note: Source: dimensions in profiler/models.py\n"
        f"Wrote {path}\n"
    )
    assert load(path).name == "mine"
    assert dsim(*command).refusal == f"{path} exists: choose another name, or pass --force to replace it"


def test_json_is_one_object() -> None:
    printed = succeed("profile", "--roofline", "a100", "--model", "SDAR-8B", "--no-graphs", "--json").json
    sheet = Profiled.from_json(printed).sheet
    assert sheet is not None
    assert (sheet.floor, sheet.bound_by_launch) == (0.041, True)


@pytest.mark.slow
def test_a_log_is_fitted_and_shown(tmp_path: Path) -> None:
    path, page = (tmp_path / f"mine.{ending}" for ending in ("json", "html"))
    command = ("profile", "--from-log", EXAMPLE, "-o", path)
    shown = succeed(*command).out.splitlines()
    assert "from a step log (synthetic log, no device ran it): estimated, not measured. Valid: 119 step" in shown[0]
    heads = [line.split()[0].removesuffix(":") for line in shown[1:-1]]
    assert heads == ["table", "judged", "judged", "floor", "unknown", "commits", "front", "Note"]
    assert shown[-1] == f"Wrote {path}, {page}"
    assert not load(path).doubts
    assert page.read_text().startswith("<!DOCTYPE html>")
    for taken in (path, page):
        assert dsim(*command).refusal == f"{taken} exists: choose another name, or pass --force to replace it"
        path.unlink(missing_ok=True)


def facts(profile: Profile) -> list[tuple[str, str]]:
    return list(Profiled(profile).page().facts)


def test_captured_steps_are_told() -> None:
    known = load("a100-sdar-8b")
    padded = "are padded to 1, 2, 4 ... 256, 512, 768 ... and wait for no launch"
    for graph_tokens, lines in ((512, [f"decode steps of at most 512 tokens {padded}"]), (0, [])):
        profile = replace(known, latency=replace(known.latency, graph_tokens=graph_tokens))
        assert [text for name, text in facts(profile) if name == "graphs"] == lines


def test_a_fit_that_is_not_valid_is_written_told_and_exits_1(tmp_path: Path) -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if '"kind"' not in line or '"kind":"step"' in line]
    log = tmp_path / "few.jsonl"
    log.write_text("\n".join(lines[:12]) + "\n")
    path = tmp_path / "p.json"
    ran = dsim("profile", "--from-log", log, "-o", path, "--json")
    assert ran.code == 1
    profile = Profiled.from_json(ran.json).profile
    assert (profile.origin, profile.commits) == ("calibrated", ())
    assert profile.doubts[0].startswith("too few points: ")
    assert load(path) == profile
    assert f"Not valid: {profile.fit.num_points} step shapes" in (tmp_path / "p.html").read_text()


def test_an_interrupted_measurement_is_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, path = load("l40s-llada-8b"), tmp_path / "p.json"
    steps = samples(np.ones((3, len(FEATURES))), [0.01] * 3)

    def profile_model(*_: Any, keep: Any, **__: Any) -> None:
        keep(profile, steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "profile_model", profile_model)
    ran = dsim("profile", "--model", "tiny", "--device", "cpu", "-o", path)
    assert ran.code == 130
    written = ", ".join(str(path.with_suffix(ending)) for ending in (".json", ".html", ".csv"))
    assert f"Stopped early: wrote {written} with what was measured before\n" in ran.err
    assert load(path) == replace(profile, name=load(path).name)
    assert len(path.with_suffix(".csv").read_text().splitlines()) == 1 + len(steps)


def test_refusals_are_one_line() -> None:
    for arguments, message in {
        (): "nothing to profile: expected --model M, --from-log FILE, or --roofline GPU --model MODEL",
        ("--from-log", "x", "--roofline", "h200"): "--roofline and --from-log are two ways to make a profile",
        ("--roofline", "v100", "--model", "SDAR-8B"): "no GPU is named v100; the known ones are ",
    }.items():
        assert dsim("profile", *arguments).refusal.startswith(message)


def test_a_measured_full_sequence_profile_says_what_can_commit() -> None:
    base = load("l40s-llada-8b")
    cache_overhead = (CacheOverhead("FastCache", "reuse", 0.0015, 0.0), CacheOverhead("MaskKV", "full", 0.001, 2e-6))
    profile = replace(base, commits=(), latency=replace(base.latency, cache_overhead=cache_overhead))
    assert facts(profile)[-2:] == [
        ("commits", "none: policies commit fixed numbers (strategy=low_confidence_static)"),
        ("front end", "not measured: 0"),
    ]
