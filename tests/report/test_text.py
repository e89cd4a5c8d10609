"""The report in words: warnings first, plain text in a pipe, digits that fit."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import dsim
from dsim.engine.journal import StepTotals
from dsim.engine.spec import parse
from dsim.planner.record import profile_notes
from dsim.profiler.profile import load
from dsim.report.run_page import answer, run_page, run_words
from dsim.report.table import compare, number
from dsim.report.text import render
from dsim.results.metrics import Summary, summarize
from dsim.results.provenance import profile_notes as notes_on
from dsim.results.run_info import CommitInfo, FleetCost, ProfileInfo, RunInfo, TraceInfo
from dsim.results.slo import Slo
from dsim.results.world import World

from ..checks import cases
from .fixtures import rejected, request, request_columns, unfinished


def summary(policy: str = "ar", ttft: float = 1.0, slos: tuple[str, ...] = ("ttft=2s",)) -> Summary:
    rows = [request([(ttft, 4), (ttft + 1, 4)], arrival=float(i)) for i in range(4)]
    return summarize(policy, request_columns(rows), StepTotals(), [Slo.parse(s) for s in slos])


def info(*summaries: Summary, **more: Any) -> RunInfo:
    return RunInfo(**({"trace": TraceInfo("a trace"), "policies": summaries} | more))


def printed(*summaries: Summary, console: dict[str, Any] | None = None, **more: Any) -> str:
    out = io.StringIO()
    render(run_words(info(*summaries, **more)), Console(file=out, **(console or {})))
    return out.getvalue()


def test_overload_is_the_first_thing_said() -> None:
    lines = printed(summary("calm"), replace(summary("busy"), stable=False)).splitlines()
    assert lines[0].startswith("OVERLOADED busy: the queue grows without bound (p99 wait 0 ms)")
    assert printed(replace(summary(), stable=False), interrupted=True).startswith("INTERRUPTED")


def test_unfinished_and_rejected_requests_are_said_before_any_number() -> None:
    requests = request_columns([request([(1.0, 4)]), rejected(), unfinished(), unfinished()])
    lines = printed(summarize("p", requests, StepTotals())).splitlines()
    assert lines[0].startswith("UNFINISHED p: 2 of 4 requests were still in flight")
    assert lines[1].startswith("REJECTED p: 1 of 4 requests can never fit")


def test_the_answer_ranks_policies_by_attainment() -> None:
    slow, fast = summary("slow", 3.0), summary("fast")
    assert answer(info(slow, fast)) == "fast meets the SLOs for 100.0 % of requests, slow for 0.0 %."
    assert answer(info(fast, fast)) == "Every policy meets the SLOs for 100.0 % of requests."
    apart = {"slow": profile(implementation="a script"), "fast": profile(implementation="vLLM")}
    said = "fast meets the SLOs for 100.0 % of requests, slow for 0.0 %; steps are priced by different implementations"
    assert answer(info(slow, fast, profiles=apart)) == f"{said} (a script and vLLM)."


def test_without_slos_the_answer_is_the_time_a_token() -> None:
    slow, fast = summary("slow", 3.0, slos=()), summary("fast", slos=())
    times = [number(p.norm_latency_ms.p50) for p in (fast, slow)]
    assert answer(info(slow, fast)) == f"The median request's time a token: fast {times[0]} ms, slow {times[1]} ms."
    assert answer(info()) == ""


def profile(**more: Any) -> ProfileInfo:
    return ProfileInfo(**({"name": "a", "device": "no GPU", "model": "none", "implementation": "a script"} | more))


@cases("estimated", True, False)
def test_a_profile_is_estimated_unless_it_says_otherwise(estimated: bool) -> None:
    text = printed(summary(), profiles={"ar": profile(estimated=estimated)})
    assert ("Profile: a (none, no GPU, a script): estimated, not measured" in text) is estimated


def test_an_extrapolated_commit_model_is_named_once() -> None:
    commit = CommitInfo("ar", "sharegpt", block_length=16, extrapolated_from=32)
    text = printed(summary(), commit_models=(commit, commit))
    line = "Commit model: workload sharegpt, block 16: extrapolated from block 32, nothing was fitted here"
    assert text.count(line) == 1


def test_runs_that_draw_from_different_workloads_are_told_apart() -> None:
    commits = (
        CommitInfo("sglang-joint", "gsm8k", block_length=32, median_steps=4.396),
        CommitInfo("sglang-fdfo", "sharegpt", block_length=32, threshold=0.9),
    )
    text = printed(summary(), commit_models=commits)
    assert "Commit model: workload gsm8k, block 32, a law of 4.4 forwards (median) (sglang-joint)\n" in text
    assert "Commit model: workload sharegpt, block 32, threshold 0.9 (sglang-fdfo)\n" in text


def test_notes_say_what_was_dropped_or_changed() -> None:
    trace = TraceInfo("a trace", skipped_bad=2, failed_in_trace=1, sorted_rows=3, hash_ids=True)
    assert run_words(info(summary(), trace=trace)).notes == (
        "skipped rows of the trace that could not be read: 2",
        "dropped rows with output_length 0 (failed in the trace): 1",
        "rows out of order, sorted by timestamp: 3",
        "the trace has hash_ids, and ar computes prompts whole: prefix_caching=true reuses prefixes",
    )
    assert run_words(info()).notes == ()


@cases("unknown says", (("host_request",), "host_request"), (("host_step", "x"), "host_step and x"))
def test_what_a_profile_does_not_know_is_told(
    unknown: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.results.provenance.unknown_host", lambda profile: unknown)
    mine = replace(load("a100-sdar-8b"), name="mine")
    line = f"mine does not know {says}, stored as 0: `dsim replay --ensemble 19` shows how much that may cost"
    assert line in notes_on([(parse("ar"), mine)])


def test_a_profile_that_failed_its_own_checks_says_so_wherever_it_is_used() -> None:
    held = load("a100-sdar-8b")
    noisy = replace(held, name="noisy", fit=replace(held.fit, doubts=("noise is 79.8%",)))
    run = dsim.replay("azure-conv", "chunk:8", profile=noisy, num_requests=20)
    said = "noisy failed its own checks: noise is 79.8%"
    assert said in run.page().notes
    assert ("Doubted.", said) in run_page(run.run).cautions
    assert f"DOUBTED: {said}" in dsim.compare(run.run.folder, run.run.folder).page().alarms
    assert profile_notes([World("azure-conv", profile_object=noisy)])[0] == said


def test_a_run_says_which_of_its_steps_the_profile_doubts() -> None:
    run = dsim.replay("azure-conv", "chunk:8", profile="h100-sdar-8b/dsim", num_requests=80, concurrency=64)
    [said] = run.doubted
    assert said.startswith("h100-sdar-8b/dsim doubts parts of chunk:8's busy time, ")
    assert " % in decode steps above 256 tokens (more than 8 sequences): 2 to 7 % too fast" in said
    assert said in run.page().notes
    assert run_page(run.run).cautions == (("Doubted.", said),)
    assert f"DOUBTED: {said}" in dsim.compare(run.run.folder, run.run.folder).page().alarms


def test_a_pipe_gets_plain_lines_as_wide_as_they_need() -> None:
    names = [f"optimus,num_blocks=2,window=W2,seed={i}" for i in range(4)]
    text = printed(*map(summary, names), console={"width": 80})
    assert "\x1b" not in text
    header = next(line for line in text.splitlines() if names[0] in line)
    assert all(name in header for name in names)


def test_a_narrow_terminal_gets_every_policy() -> None:
    names = [f"policy-{i}" for i in range(6)]
    narrow = printed(*map(summary, names), console={"width": 90, "force_terminal": True, "color_system": None})
    assert max(map(len, narrow.splitlines())) <= 90
    assert "".join(names).replace("-", "") in re.sub(r"[-\W]", "", narrow)


@cases(
    "value text",
    (None, "–"), (float("nan"), "–"), (0.0, "0"),
     (0.01234, "0.0123"), (4.5678, "4.57"), (99.95, "100"), (45.67, "45.7"),
     (123.4, "123"), (12345.6, "12,346"), (-4.5678, "-4.57"),
)  # fmt: skip
def test_numbers_show_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_best_is_marked_and_ties_deserters_and_those_without_the_metric_are_not() -> None:
    slow, fast = summary("slow", 3.0), summary("fast")
    best = {row.cells[0]: {i - 2 for i in row.best} for row in compare([slow, fast])}
    assert (best["ttft p50"], best["SLO attainment"]) == ({1}, {1})
    assert best["completed"] == best["tpot_chunk p50"] == frozenset()
    best = {row.cells[0]: {i - 2 for i in row.best} for row in compare([slow, replace(fast, unfinished=1)])}
    assert best["ttft p50"] == frozenset()
    none = replace(fast, ttft_ms=replace(fast.ttft_ms, p50=None))
    assert {row.cells[0]: {i - 2 for i in row.best} for row in compare([none, slow, fast])}["ttft p50"] == {2}


def test_a_row_has_one_unit() -> None:
    rows = {row.cells[0]: row for row in compare([summary("slow", 30.0), summary("fast")])}
    assert rows["ttft p50"].cells == ("ttft p50", "s", "30.0", "1.00")


def test_a_price_is_told_with_what_a_million_good_requests_cost() -> None:
    [told] = [line for line in printed(summary("p"), cost=FleetCost(2, 4.0, "EUR")).splitlines() if "EUR" in line]
    million = 4.0 / (3600 * summary("p").goodput) * 1e6
    assert told == f"Cost: 4.00 EUR an hour for 2 GPUs; a million good requests: p {million:,.2f}"
    assert "Cost: " not in printed(summary("p"))
