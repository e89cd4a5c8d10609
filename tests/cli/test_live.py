"""dsim live, from arguments to what is printed, written and refused: a decoder of random weights stands for a model."""

import itertools
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable
from dsim.engine.latency import LatencyModel
from dsim.engine.replay import replay
from dsim.engine.spec import parse
from dsim.live.forward import Batch, Forward, Sampled
from dsim.live.weights import random_model
from dsim.research.tiny.saved import save_model
from dsim.results.run import read_run
from dsim.results.run_folder import FILES

from ..checks import cases
from ..live.dense import SMALL, save_profile
from ..traces.files import save
from .command import Ran, dsim, succeed

POLICY = "max_batch=4,page_size=8"


@pytest.fixture(autouse=True)
def _files() -> None:
    """A trace of eight requests at once, a model, its prompts, and a profile of it."""
    rows = [{"timestamp": 10 * i, "input_length": 5 + 7 * i, "output_length": 3 + 4 * i} for i in range(8)]
    save(rows, "trace.jsonl")
    save_model(random_model(SMALL, "cpu", torch.float32), Path("model"), torch.float32)
    save([[i, i + 1, 2 * i] for i in range(40)], "prompts.jsonl")
    latency = LatencyModel(((0.0, 1e-3), (64.0, 2e-3), (128.0, 4e-3)), 1e-5)
    save_profile(SMALL, "a100-sdar-8b", "ours", latency=latency)


def live(*arguments: object) -> Ran:
    return dsim("live trace.jsonl --model model", *arguments)


def test_it_serves_under_several_policies_and_writes_what_replay_writes_and_a_journal_that_replays() -> None:
    specs = [f"lmdeploy-bd32:4,{POLICY}", f"chunk:2,block_length=4,{POLICY}", f"ar,{POLICY}"]
    ran = live("--prompts prompts.jsonl", [part for spec in specs for part in ("--policy", spec)], "-o run")
    assert ran.code == 0, ran.err
    assert "Measured on: CPU" in ran.out
    assert "the weights decide the commits" in ran.out
    assert sorted(path.name for path in Path("run").iterdir()) == sorted(FILES[:4])
    run = read_run("run")
    assert (run.info.driver, run.info.commits) == ("live", "model")
    assert run.info.profiles == {}
    for spec in specs:
        requests, steps = run.requests(spec), run.steps(spec)
        assert (requests["status"] == 0).all()
        assert (steps["device"] > 0).all()
        assert (steps["device"] <= steps["latency"]).all()
        fresh = Engine(parse(spec), run.info.limits[spec], RequestTable(8))
        assert list(replay(fresh, 0, requests, steps, run.step_lists(spec))) == []
    report = Path("run/report.html").read_text()
    assert "Measured on" in report
    assert "Estimated, not measured" not in report


def test_the_twins_draws_commit_what_the_twin_commits_and_requests_are_compared_one_by_one() -> None:
    spec = "chunk:2,block_length=4," + POLICY
    ran = live("--commits twin --profile ours.json --policy", spec, "-o", "measured", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["commits"] == "twin"
    assert ran.json["live"]["host_ms"][spec] > 0
    succeed("replay trace.jsonl --profile ours.json --policy", spec, "-o", "predicted")
    (cell,) = succeed("compare predicted measured --profile ours.json --json").json["cells"]
    assert (cell["unpaired"], cell["num_both"]) == ("", 8)
    # What a request commits in all is the draws', whenever its steps come.
    sides = [read_run(name).requests(spec) for name in ("predicted", "measured")]
    assert sides[0]["num_committed"].tolist() == sides[1]["num_committed"].tolist()


@cases(
    "arguments says",
    ("--commits twin", "commits is twin and no profile is given"),
    ("--prompts prompts.jsonl --policy optimus", "optimus chooses by T(c, b): expected a profile"),
    ("--prompts prompts.jsonl --policy chunk:8", "chunk:8: block_length is 32, and small was trained"),
    ("--prompts prompts.jsonl --policy ar,num_pages=1,page_size=4", "trace: none of its 8"),
)  # fmt: skip
def test_bad_input_is_one_line(arguments: str, says: str) -> None:
    assert live(arguments, "-o run").refusal.startswith(says)
    assert not Path("run").exists()


def test_without_pytorch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("dsim.live", "dsim.profiler.measure"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    line = live("--prompts prompts.jsonl --policy ar").refusal
    assert line == "torch is not installed, expected the extra live: pip install '.[live]' in a clone of dsim"


@cases("why", "the device is out of memory", r"(\d) of \1 rows have no finite logit, or a NaN")
def test_a_step_that_fails_loses_no_finished_request(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    whole, steps = Forward.run, itertools.count()

    def fails_at_last(self: Forward, batch: Batch) -> Sampled:
        if next(steps) == 30:
            if "device" in why:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            self.model.head_weight.data.fill_(torch.nan)
        return whole(self, batch)

    monkeypatch.setattr(Forward, "run", fails_at_last)
    ran = live("--prompts prompts.jsonl --policy", f"ar,{POLICY}", "-o", "run")
    assert ran.code == 2
    assert re.search(f"Error: {why}", ran.err.splitlines()[-1])
    assert "Wrote run/" in ran.err
    run = read_run("run")
    assert 0 < (run.requests(f"ar,{POLICY}")["status"] == 0).sum() < 8
    assert run.info.interrupted is True
    assert "UNFINISHED" in ran.out


def test_ctrl_c_writes_what_is_done_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, steps = Forward.run, itertools.count()

    def interrupted(self: Forward, batch: Batch) -> Sampled:
        if next(steps) == 30:
            signal.raise_signal(signal.SIGINT)
        return whole(self, batch)

    monkeypatch.setattr(Forward, "run", interrupted)
    ran = live("--prompts prompts.jsonl --policy", f"ar,{POLICY}", "-o", "run", "--json")
    assert ran.code == 130, ran.err
    (p,) = ran.json["policies"]
    assert 0 < p["completed"] < 8
    assert any(line.startswith("Interrupted: ar,") for line in ran.err.splitlines())
    assert read_run("run").info.interrupted is True


def test_the_shipped_model_answers_its_own_workloads() -> None:
    ran: Any = dsim("live trace.jsonl --policy lmdeploy-bd32,max_batch=4 --json")
    assert ran.code == 0, ran.err
    assert ran.json["live"]["prompts"] == "records"
    (p,) = ran.json["policies"]
    assert p["completed"] == 8
    # More than one token a forward, the KV pass included: what block diffusion is for.
    assert p["tpf"] > 1.0
