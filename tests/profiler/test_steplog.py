"""A step log is read line by line, fitted, and refused in one line that names the place and both values."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsim
from dsim.comparison.clients.client_file import read_client
from dsim.comparison.clients.measured import measured_run
from dsim.engine.errors import DsimError, ProfileError
from dsim.engine.latency import Features
from dsim.profiler.fit import predict
from dsim.profiler.logged import NO_LIMIT
from dsim.profiler.profile import Profile, load, save
from dsim.profiler.samples import samples
from dsim.profiler.steplog import StepLog, fittable, profile_of_log, read_log

from ..worlds import refusal

EXAMPLE = Path(dsim.__file__).parent / "examples" / "steplog.jsonl"
HEADER: dict[str, Any] = {
    "schema": "dsim-steplog", "version": 1, "synthetic": False, "engine": "LMDeploy 0.11", "device": "H200",
    "memory_bytes": 150_000_000_000, "model": "SDAR-8B", "block_length": 4, "threshold": 0.9, "workload": "chat",
}  # fmt: skip
STEP: dict[str, Any] = {"kind": "step", "step": 0, "latency": 0.02, "batch": 2, "tokens": 8, "sum_kv": 100}
REQUEST: dict[str, Any] = {"kind": "request", "request": 5, "input_length": 6}
FIRST: dict[str, Any] = {"kind": "sequence", "request": 5, "step": 0, "block_start": 4, "committed": [3]}
LAST: dict[str, Any] = {**FIRST, "step": 1, "committed": [2]}
NEXT: dict[str, Any] = {**FIRST, "step": 3, "block_start": 8, "committed": [0, 2], "computed": [0, 2, 3]}
KNOWN: dict[str, Any] = {**REQUEST, "arrival": 0}
ROW: dict[str, Any] = {
    **STEP, "batch": 1, "start": 1, "latency": 1, "requests": [5], "phases": "denoise", "row_tokens": 8, "row_keys": 9,
    "emitted": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def example() -> tuple[StepLog, Profile]:
    """The log that is shipped, and what is fitted to it."""
    log = read_log(EXAMPLE)
    return log, profile_of_log(log, "mine", "examples/steplog.jsonl")


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_lines_become_steps_and_rows(tmp_path: Path) -> None:
    prefill = {**STEP, "step": 1, "prefill_tokens": 8, "sum_q_kv": 64, "device": 0.015}
    log = read_log(written(tmp_path, HEADER, STEP, REQUEST, "", FIRST, prefill, LAST, NEXT))
    assert (log.header.model.layers, log.header.weight_bytes, log.header.page_size) == (36, None, 64)
    # tokens, q.kv (as many a row), kv, LM head and sampled rows (a prefill's last blocks), batch, prefill, forwards
    assert log.steps.features[:, :8].tolist() == [[8, 400, 100, 8, 8, 2, 0, 1], [8, 64, 100, 8, 8, 2, 8, 1]]
    assert log.steps.latency.tolist() == [0.02, 0.02]
    assert np.isnan(log.steps.device[0])
    assert log.steps.device[1] == 0.015
    assert np.isnan(log.requests.arrival).all()  # a log may leave them out
    assert (log.commits.request.tolist(), log.commits.block_start.tolist()) == ([5, 5, 5], [4, 4, 8])
    # Of the first block two positions are prompt.
    assert log.commits.masked.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]]
    assert log.commits.window.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [1, 0, 1, 1]]
    assert log.commits.committed.astype(int).tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 1, 0]]


BAD = [
    ((), "log:1: schema is 'None', expected 'dsim-steplog' in the first line"),
    (({**HEADER, "version": 4},), "log:1: version is 4, expected 1"),
    (({**HEADER, "model": "x"},), "log:1: no model is named x; the known ones are"),
    (({**HEADER, "model": {"config": {}}},), "log:1: model.config.num_hidden_layers or n_layers is missing, expected"),
    (({**HEADER, "block_length": 2_000},), "log:1: block_length is 2000, expected 1 to 1024"),
    ((HEADER,), "log holds no step lines"),
    ((HEADER, "{"), "log:2: cannot be read as JSON: "),
    ((HEADER, "3"), "log:2: the line is 3, expected an object"),
    ((HEADER, {"step": 0}), "log:2: kind is missing, expected one of step, request, sequence"),
    ((HEADER, {**STEP, "kind": "x"}), 'log:2: kind is "x", expected one of step, request, sequence'),
    ((HEADER, {**STEP, "latency": 0}), "log:2: latency is 0, expected more than 0 and at most 3600"),
    ((HEADER, {**STEP, "latency": 4e3}), "log:2: latency is 4000.0, expected more than 0 and at most 3600"),
    ((HEADER, KNOWN, {**ROW, "start": 2}, ROW), "log:4: start is 1.0, expected at least 2, that of the step"),
    ((HEADER, KNOWN, ROW, {**ROW, "latency": 0.5}), "log:4: end is 1.5, expected at least 2, when request 5"),
    ((HEADER, {**KNOWN, "arrival": 3}, ROW), "log:3: end is 2.0, expected at least 3, when request 5"),
    ((HEADER, {**STEP, "device": 0.03}), "log:2: device is 0.03, expected more than 0 and at most latency, 0.02"),
    ((HEADER, {**STEP, "tokens": 1}), "log:2: tokens is 1, expected at least batch, 2"),
    ((HEADER, {**STEP, "prefill_tokens": 9}), "log:2: prefill_tokens is 9, expected at most tokens, 8"),
    ((HEADER, {**STEP, "tokens": 2**31}), f"log:2: tokens is {2**31}, expected 1 to {2**31 - 1}"),
    ((HEADER, STEP, FIRST), "log:3: request is 5, expected one that a request line has named before"),
    ((HEADER, REQUEST, REQUEST), "log:3: request 5 is given twice, expected one line a request"),
    ((HEADER, REQUEST, {**FIRST, "block_start": 6}), "log:3: block_start is 6, expected a multiple of 4 from 4 on"),
    ((HEADER, REQUEST, FIRST, NEXT), "log:4: block_start is 8, expected 4, whose block has 1 masks left"),
    (
        (HEADER, REQUEST, FIRST, LAST, NEXT, LAST),
        "log:6: block_start is 4, expected at least 8, the block of the line before",
    ),
    ((HEADER, REQUEST, {**FIRST, "committed": [4]}), "log:3: committed[0] is 4, expected 0 to 3"),
    ((HEADER, REQUEST, {**FIRST, "committed": [1]}), "log:3: committed holds 1, expected a position that is a mask"),
    ((HEADER, REQUEST, {**FIRST, "computed": [2]}), "log:3: committed holds 3, expected a position that is computed"),
    ((HEADER, KNOWN, {**ROW, "emitted": [1.5]}), "log:3: emitted[0] is 1.5, expected a whole number"),
    ((HEADER, KNOWN, {**ROW, "requests": 0}), "log:3: requests is 0, expected a list"),
    ((HEADER, KNOWN, {**ROW, "requests": [7]}), "log:3: requests[0] is 7, expected one that a request line has named"),
    ((HEADER, KNOWN, {**ROW, "emitted": [1, 2]}), "log:3: emitted has 2 values, expected 1"),
    ((HEADER, KNOWN, {**ROW, "row_keys": [3]}), "log:3: row_keys[0] is 3, expected at least row_tokens[0], 8"),
    ((HEADER, {"kind": "finish", "request": 7, "time": 1.0}), "log:2: request is 7, expected one that a request line"),
]


@pytest.mark.parametrize(("lines", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, lines: tuple[Any, ...], message: str) -> None:
    path = written(tmp_path, *lines)
    assert refusal(ProfileError, read_log, path).replace(str(path), "log").startswith(message)


def test_the_example_gives_back_the_profile_that_drew_it(tmp_path: Path, example: tuple[StepLog, Profile]) -> None:
    log, profile = example
    truth = load("a100-sdar-8b")
    # The log says that no device ran it: so its profile is no measurement.
    assert log.header.synthetic
    assert (profile.origin, profile.verdict) == ("calibrated", "estimated, not measured")
    assert "synthetic" in profile.description
    errors = profile.fit.standard_errors or {}
    assert abs(profile.latency.launch - truth.latency.launch) < 3 * errors["launch"]
    served = Features(800, 800 * 300, 25 * 300, 800, 800, 25, 0)
    assert profile.latency.step(served) == pytest.approx(truth.latency.step(served), rel=0.03)
    assert not profile.fit.doubts
    one_kind = runpy.run_path(str(EXAMPLE.with_name("make_steplog.py")))["of_one_kind"]
    [known] = one_kind(truth).commits
    stated = profile.commit_fits[0].standard_errors
    for name in ("request_spread", "block_spread", "step_spread"):
        assert abs(getattr(profile.commits[0], name) - getattr(known, name)) < 3 * stated[name]
    assert profile.memory == truth.memory
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile


def test_the_example_is_what_its_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steplog.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_steplog.py", str(path)])
    for patience in ("PATIENCE", "MANY_REQUESTS"):  # compiling takes longer than all its steps
        monkeypatch.setattr(f"dsim.engine.core.{patience}", 10**9)
    runpy.run_path(str(EXAMPLE.with_name("make_steplog.py")), run_name="__main__")
    assert capsys.readouterr().out == f"Wrote {path}\n"
    assert path.read_bytes() == EXAMPLE.read_bytes()


def test_steps_of_a_device_alone_make_a_measured_profile(tmp_path: Path) -> None:
    steps = [
        {**STEP, "step": i, "batch": b, "tokens": 4 * b, "sum_kv": k * b, "latency": 0.01 + 1e-5 * b + 1e-7 * k * b}
        for i, (b, k) in enumerate((b, k) for b in range(1, 40, 3) for k in (100, 900))
    ]
    log = read_log(written(tmp_path, HEADER, *steps))
    profile = profile_of_log(log, "mine", "log.jsonl")
    assert (profile.origin, profile.commits, profile.fit.doubts) == ("measured", (), ())
    assert profile.latency.kv_read + 4 * profile.latency.attention == pytest.approx(1e-7, rel=1e-3)


def test_the_lines_of_the_document_are_a_log(tmp_path: Path) -> None:
    text = (EXAMPLE.parents[1] / "docs" / "steplog.md").read_text(encoding="utf-8")
    log = read_log(written(tmp_path, *text.split("```jsonl\n")[1].split("```")[0].splitlines()))
    assert log.steps.features[:, :8].tolist() == [[352, 67584, 352, 32, 32, 1, 352, 1]]
    assert np.flatnonzero(log.commits.committed).tolist() == [13, 14]


def test_a_step_whose_end_came_late_and_the_short_one_behind_it_are_not_fitted() -> None:
    shapes = [*((64, 64 + i) for i in range(60)), *((512, 512 + i) for i in range(8))]
    features = [Features(tokens, tokens * keys, keys, tokens, tokens, 1, 0) for tokens, keys in shapes]
    latency = np.array([0.02 + 1e-3 * (keys - 64) if tokens == 64 else 0.3 for tokens, keys in shapes])
    assert fittable(samples(features, latency)).all()  # four times longer from the first key to the last
    latency[30] += latency[31] - 2e-4
    latency[31] = 2e-4
    latency[62] = 0.1  # eight of its size are too few to say
    assert np.flatnonzero(~fittable(samples(features, latency))).tolist() == [30, 31]


HEADER2: dict[str, Any] = {**HEADER, "preset": "lmdeploy-bd4", "started": 1.7e9}
ARRIVED: list[dict[str, Any]] = [
    {"kind": "request", "request": 0, "id": "a", "input_length": 4, "output_length": 9, "arrival": 0.5,
     "received": 0.4, "diffusion_max_steps": 6},
    {"kind": "request", "request": 1, "id": "b", "input_length": 8, "arrival": 0.25},
]  # fmt: skip


def rows(start: float, requests: list[int], phases: list[str], emitted: list[int]) -> dict[str, Any]:
    """A step of blocks of four, a tenth of a second long."""
    n = len(requests)
    return {
        "kind": "step", "step": 0, "start": start, "latency": 0.1, "batch": n, "tokens": 4 * n, "sum_kv": 8 * n,
        "requests": requests, "phases": phases, "row_tokens": [4] * n, "row_keys": [8] * n, "emitted": emitted,
        "graph": True, "waiting": 0, "running": n, "pages": n,
    }  # fmt: skip


def test_requests_of_a_log_have_their_arrivals_and_emissions(tmp_path: Path) -> None:
    log = read_log(
        written(
            tmp_path, HEADER2, *ARRIVED, rows(1.0, [1, 0], ["prefill", "prefill"], [0, 0]),
            rows(1.1, [1, 0], ["denoise", "denoise"], [0, 4]), rows(1.25, [1, 0], ["denoise", "denoise"], [4, 0]),
            rows(1.5, [0], ["denoise"], [3]), {"kind": "finish", "request": 0, "time": 1.61},
        )
    )  # fmt: skip
    r = log.requests
    assert (log.header.preset, log.header.started) == ("lmdeploy-bd4", 1.7e9)
    assert r.request.tolist() == [1, 0]  # in order of arrival
    assert r.output_length.tolist() == [4, 9]  # what came out where nobody said what was asked for
    assert r.scheduled.tolist() == [1.0, 1.0]
    assert r.first_emission.tolist() == pytest.approx([1.35, 1.2])
    assert r.last_emission.tolist() == pytest.approx([1.35, 1.6])
    assert (r.num_first.tolist(), r.num_tokens.tolist(), r.num_emissions.tolist()) == ([4, 4], [4, 7], [1, 2])
    assert np.isnan(r.finish[0])
    assert r.finish[1] == 1.61
    assert r.gaps.tolist() == pytest.approx([0.4])
    assert (r.canvases.request.tolist(), r.canvases.num_steps.tolist()) == ([0, 1, 0], [1, 2, 2])
    assert r.canvases.limit is not None
    assert r.canvases.limit.tolist() == [6, NO_LIMIT, 6]
    steps = log.rows
    assert (steps.start.tolist(), steps.offsets.tolist()) == ([1.0, 1.1, 1.25, 1.5], [0, 2, 4, 6, 7])
    assert (steps.request.tolist(), steps.emitted.tolist()) == ([1, 0, 1, 0, 1, 0, 0], [0, 0, 0, 4, 4, 0, 3])


def test_one_value_is_that_of_all_rows(tmp_path: Path) -> None:
    long = rows(1.0, [1, 0], ["denoise", "denoise"], [4, 4])
    short = {**long, "phases": "denoise", "row_tokens": 4, "row_keys": 8, "emitted": 4}
    first, second = (read_log(written(tmp_path, HEADER2, *ARRIVED, line)) for line in (long, short))
    for name in ("request", "phase", "tokens", "emitted"):
        assert getattr(first.rows, name).tolist() == getattr(second.rows, name).tolist(), name
    assert first.requests.num_tokens.tolist() == second.requests.num_tokens.tolist() == [4, 4]


def test_an_engines_own_log_is_a_measured_run(tmp_path: Path) -> None:
    path = written(
        tmp_path, HEADER2, *ARRIVED, rows(1.0, [1, 0], ["decode", "decode"], [1, 1]),
        rows(1.1, [1, 0], ["decode", "decode"], [1, 1]), {"kind": "finish", "request": 1, "time": 1.2},
    )  # fmt: skip
    run = measured_run(read_client(path))
    summary = run.info.policies[0]
    assert (summary.completed, summary.unfinished) == (1, 1)
    assert run.columns["arrival"].tolist() == [0.0, 0.25]
    assert summary.ttft_ms.mean == pytest.approx(1e3 * (1.1 - 0.25))
    assert summary.e2el_ms.mean == pytest.approx(1e3 * (1.2 - 0.25))
    with pytest.raises(DsimError, match="a request has no arrival, expected a step log"):
        read_client(written(tmp_path, HEADER, STEP, REQUEST, FIRST))


def test_all_steps_of_a_log_together_take_by_its_profile_as_long_as_they_did(example: tuple[StepLog, Profile]) -> None:
    log, profile = example
    # A tail that no median sees: every eighth step takes three times as long.
    times = np.where(np.arange(len(log.steps.latency)) % 8, 1.0, 3.0)
    none = log.commits[np.zeros(len(log.commits), np.bool_)]
    tail = replace(log, steps=replace(log.steps, latency=log.steps.latency * times), commits=none)
    for one, fitted in ((log, profile), (tail, profile_of_log(tail, "mine", "log"))):
        assert predict(fitted.latency, one.steps.features).sum() == pytest.approx(one.steps.latency.sum(), rel=1e-4)
