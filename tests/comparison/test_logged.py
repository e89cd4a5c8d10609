"""A step log replayed as logged: what is known of the engine that wrote it comes back, and errors find their parts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw
from dsim.engine.latency import LatencyModel
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.profile import load, save
from dsim.profiler.steplog import of_random_tokens, profile_of_log, read_log

from ..checks import cases
from ..cli.command import dsim, succeed
from ..logged import poisson, write_client, write_log

SPEC = "vllm-ar,max_num_seqs=4,max_num_batched_tokens=64,async_scheduling=false,num_pages=400"
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False, "dtype": "bfloat16"}
LATENCY = LatencyModel(((0.0, 0.01), (16.0, 0.0132), (64.0, 0.0228)), 2e-4, attention=1e-7, kv_read=2e-7)
LAW = CanvasLaw("drawn", 16, 9.0, request_spread=0.25, canvas_spread=0.2, drift=1.05, least=2, most=48)
CANVAS = "vllm-diffusion,max_num_seqs=8,canvas_length=16,num_pages=4000,async_scheduling=false"


def later(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a log's requests as if they had come again, half as fast, and been answered at leisure."""
    made = dict(line)
    if line["kind"] == "request":
        made |= {"request": line["request"] + 1000, "arrival": 2 * line["arrival"] + 100}
    elif line["kind"] == "step":
        made |= {"requests": [i + 1000 for i in line["requests"]], "start": 2 * line["start"] + 100}
    elif line["kind"] == "finish":
        made |= {"request": line["request"] + 1000, "time": 2 * line["time"] + 100}
    return made


@pytest.fixture(autouse=True)
def _here() -> None:
    profile = replace(load("a100-sdar-8b"), name="known", latency=LATENCY, canvas_laws=(LAW,))
    save(profile, "known.json")
    save(replace(profile, name="slow", latency=LATENCY.scaled(1.25)), "slow.json")
    save(replace(profile, name="outside", frontend=0.05), "outside.json")


def log_of(trace: Any = None, **header: Any) -> Path:
    how = {"early": 3.0, "settings": SETTINGS, **header}
    return write_log(Path("log.jsonl"), SPEC, load("known.json"), trace or poisson(30, 6.0, 0), **how)


def parts(*compared: str) -> dict[str, Any]:
    (cell,) = succeed("compare", *compared, "--json").json["cells"]
    assert cell["no_parts"] == ""
    return dict(cell)


def test_a_log_replayed_as_logged_by_the_profile_that_drew_it_is_the_log() -> None:
    ran = succeed("replay --as-logged", log_of(), "--profile", "known.json", "-o", "predicted")
    told = f"As logged: {SPEC}\nNot in the policy: the log's dtype\nProfile: known.json, given\n"
    assert ran.err.startswith(told)
    succeed("import log.jsonl -o engine")
    cell = parts("predicted", "engine", "--profile", "known.json")
    assert cell["policy"] == SPEC
    assert cell["steps"]["same"]
    assert cell["metrics"]["e2el"]["requests"]["mape"] < 1e-9
    assert cell["metrics"]["queue_time"]["error"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert cell["metrics"]["step_latency"]["error"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert cell["parts"]["latency_nearest"] == 0


@pytest.mark.slow
def test_an_error_is_the_steps_prices_the_rules_or_the_front_ends() -> None:
    log = log_of()
    succeed("import", log, "-o", "engine")
    # Steps that are too dear: the rule, the commits and the front end are right.
    succeed("replay --as-logged", log, "--profile", "slow.json", "-o", "slow")
    part = parts("slow", "engine", "--profile", "slow.json")["parts"]["metrics"]["e2el"]
    assert part["latency"] == pytest.approx(part["error"])
    assert part["error"] > 0.2 * part["measured"]
    # A server that lets in more requests than its log says.
    told = Path("told.jsonl")
    told.write_text(log.read_text().replace('"max_num_seqs": 4', '"max_num_seqs": 1'))
    succeed("import", told, "-o", "told")
    succeed("replay --as-logged", told, "--profile", "known.json", "-o", "rule")
    part = parts("rule", "told", "--profile", "known.json")["parts"]["metrics"]["e2el"]
    assert abs(part["scheduling"]) > 0.05 * part["measured"]
    assert abs(part["latency"]) < 0.2 * abs(part["scheduling"])
    # A profile with 50 ms outside the engine, where a client saw 20.
    write_client(Path("bench.json"), log, 0.02)
    succeed("import bench.json --log", log, "-o", "client")
    succeed("replay", log, "--profile", "outside.json", "--policy", SPEC, "-o", "outside")
    part = parts("outside", "client", "--profile", "outside.json")["parts"]["metrics"]["e2el"]
    assert part["error"] == pytest.approx(0.03)
    assert (part["frontend"], part["latency"], part["scheduling"]) == pytest.approx((0.03, 0.0, 0.0), abs=1e-9)


@pytest.mark.slow
def test_without_a_profile_the_logs_own_is_fitted_kept_and_told() -> None:
    log_of(poisson(150, 6.0, 0))
    ran = succeed("replay log.jsonl --as-logged -o predicted")
    assert "Profile: fitted to the same log, so step prices are not a prediction (log)" in ran.err
    succeed("import log.jsonl -o engine")
    cell = parts("predicted", "engine")  # run.json holds the profile
    assert abs(cell["metrics"]["e2el"]["error"]["mean"]) < 0.02
    said = dsim("replay log.jsonl --as-logged --rate 3").refusal
    assert said == "--rate and --as-logged are given: expected one of them"


def test_a_log_without_a_preset_asks_for_one() -> None:
    log_of(preset=None)
    said = dsim("replay log.jsonl --as-logged").refusal
    assert said.startswith("the log's header has preset null, expected one of ar, lmdeploy-bd32,")
    succeed("replay log.jsonl --as-logged --policy", SPEC, "--profile", "known.json")


@pytest.mark.slow
def test_the_front_end_is_what_a_client_saw_beyond_the_log() -> None:
    # The log holds the same requests twice, then slower: the client, on a clock of its own, sent them the second time.
    log = log_of(poisson(40, 6.0, 0))
    first, *once = (json.loads(line) for line in log.read_text().splitlines())
    again = [later(line) for line in once]
    log.write_text("".join(json.dumps(line) + "\n" for line in (first, *once, *again)))
    alone = Path("alone.jsonl")
    alone.write_text("".join(json.dumps(line) + "\n" for line in (first, *again)))
    write_client(Path("bench.json"), alone, 0.007, late=1e4)
    ran = dsim("profile --from-log", log, "--client", "bench.json", "-o", "mine.json", "--json")
    assert ran.json["profile"]["frontend"] == pytest.approx(0.007, rel=1e-5)
    assert load("mine.json").frontend == pytest.approx(0.007, rel=1e-5)
    ran = dsim("profile --from-log", log, "-o", "none.json")
    assert "front end: not measured" in ran.out
    assert load("none.json").frontend == 0.0
    said = dsim("profile --model tiny --client bench.json -o x.json").refusal
    assert said == "--client is given without --from-log, expected both: alone it has no effect"


@pytest.mark.slow
def test_a_log_of_canvases_gives_back_the_law_that_drew_it() -> None:
    trace = poisson(50, 1.0, 3, output=60)
    log = write_log(Path("log.jsonl"), CANVAS, load("known.json"), trace, settings={"max_num_seqs": 8})
    held = read_log(log)
    num = len(held.requests.canvases.request)
    assert num == int((-(-trace.output_length // 16)).sum())
    profile = profile_of_log(held, "mine", "log.jsonl")
    (law,) = profile.canvas_laws
    assert (profile.family, law.workload, law.canvas_length) == ("canvas", "drawn", 16)
    # Within three standard errors of what so many requests and canvases tell, the first ones apart from the later ones.
    index = np.concatenate([np.arange(n) for n in -(-trace.output_length // 16)])
    spread = np.hypot(LAW.request_spread, LAW.canvas_spread)
    later = LAW.median * np.exp(spread**2 / 2) * (LAW.drift ** index[index > 0]).mean()
    error = np.hypot(LAW.request_spread / 50**0.5, LAW.canvas_spread / num**0.5)
    assert abs(np.log(mean_forwards(law) / later)) < 3 * error
    ratio = law.request_spread / law.canvas_spread / (LAW.request_spread / LAW.canvas_spread)
    assert abs(ratio - 1) < 3 * np.hypot(1 / (2 * 50) ** 0.5, 1 / (2 * (num - 50)) ** 0.5)
    moved = np.log(LAW.drift) * index[index > 0].mean() / spread
    error = LAW.canvas_spread / spread * (1 / 50 + 1 / (num - 50)) ** 0.5
    assert abs(law.by_canvas[1] - law.by_canvas[0] - moved) < 3 * error
    assert sum(dict(law.histogram).values()) == pytest.approx(1, abs=1e-5)
    why = f"{num} canvases of 50 requests"
    assert law.source == f"log.jsonl; {why}"
    assert why in dsim("profile --from-log", log, "-o", "mine.json").out


def test_canvases_that_all_run_to_the_cap_say_nothing_of_text_and_who_reads_them_is_told() -> None:
    known = load("known.json")
    fixed = replace(known, canvas_laws=(CanvasLaw("fixed", 16, 12.0, least=12, most=12),))
    log = write_log(Path("log.jsonl"), CANVAS, fixed, poisson(20, 1.0, 3, output=40), settings={"max_num_seqs": 8})
    why = of_random_tokens(read_log(log))
    assert "100% of 62 canvases took 12 forwards, the maximum, as with prompts of random tokens" in why
    assert f"Warning: log.jsonl: {why}" in dsim("profile --from-log", log, "-o", "mine.json").err
    mine = load("mine.json")
    assert mine.canvas_laws[0].source.endswith(why)
    assert why in mine.provenance.sources
    assert why in dsim("import", log, "--json").json["client"]["warnings"]
    text = write_log(Path("text.jsonl"), CANVAS, known, poisson(20, 1.0, 3, output=40), settings={"max_num_seqs": 8})
    assert of_random_tokens(read_log(text)) == ""
    said = write_log(Path("said.jsonl"), CANVAS, known, poisson(4, 1.0, 3), prompts="random tokens")
    assert of_random_tokens(read_log(said)) == "its prompts are random tokens: their yield is not that of text"


@pytest.mark.slow
@cases("ahead", False, True)
def test_canvases_that_were_preempted_and_answers_that_ended_early_are_replayed_as_they_were(ahead: bool) -> None:
    trace = poisson(30, 4.0, 3, output=40)
    limits = trace.output_length + np.where(np.arange(30) % 3 == 0, 20, 0)
    trace = replace(trace, extras={"max_tokens": limits.tolist()})
    few = CANVAS.replace("num_pages=4000", "num_pages=30").replace("=false", f"={str(ahead).lower()}")
    log = write_log(Path("log.jsonl"), few, load("known.json"), trace, settings={"async_scheduling": ahead})
    succeed("import", log, "-o", "engine")
    told = ("--profile", "known.json", "--seed", "7")
    ran = dsim("replay --as-logged", log, *told, "-o", "predicted", "--json")
    assert ran.json["policies"][0]["preemptions"] > 10
    cell = parts("predicted", "engine", "--profile", "known.json")
    assert cell["steps"]["same"] is not ahead  # a log does not tell which rows are for nothing
    assert cell["metrics"]["e2el"]["error"]["mean"] == pytest.approx(0.0, abs=1e-9)
    # Canvases of another law: the rule is right all the same.
    save(replace(load("known.json"), name="long", canvas_laws=(replace(LAW, median=13.0),)), "long.json")
    succeed("replay --as-logged", log, "--profile", "long.json", "-o", "long")
    part = parts("long", "engine", "--profile", "long.json")["parts"]["metrics"]["e2el"]
    assert part["error"] > 0.2 * part["measured"]
    assert part["scheduling"] == pytest.approx(0.0, abs=1e-6)


def test_a_preempted_canvas_counts_the_steps_from_its_last_start() -> None:
    trace = poisson(30, 4.0, 3, output=40)
    logs = [write_log(Path(f"{pages}.jsonl"), CANVAS.replace("=4000", f"={pages}"), load("known.json"), trace)
            for pages in (4000, 30)]  # fmt: skip
    held = [read_log(log).requests.canvases for log in logs]
    counts = [sorted(zip(of.request.tolist(), of.num_steps.tolist(), strict=True)) for of in held]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_steps_of_a_model_with_windowed_layers_are_found_again_in_its_log() -> None:
    gemma = load("h200x2-diffusiongemma/vllm")
    trace = poisson(6, 1.0, 3, prompt=1500, output=200)  # prompts on both sides of the window of 1,024
    log = write_log(
        Path("log.jsonl"), "vllm-diffusion,num_pages=4000,async_scheduling=false", gemma, trace,
        model="DiffusionGemma-26B-A4B", num_devices=2, settings={"async_scheduling": False},
    )  # fmt: skip
    told = ("--profile", gemma.name, "--workload", gemma.canvas_laws[0].workload, "--seed", "7")
    succeed("replay --as-logged", log, *told, "-o", "predicted")
    succeed("import", log, "-o", "engine")
    cell = parts("predicted", "engine", "--profile", gemma.name)
    assert cell["steps"]["same"]
    assert cell["parts"]["latency_nearest"] == 0
