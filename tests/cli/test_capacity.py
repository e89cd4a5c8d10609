"""dsim capacity, from arguments to what is printed, written and refused."""

import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dsim import __version__
from dsim.planner.capacity import FILES, CapacitySearch

from .command import dsim, held, succeed

# A queue of one prefill step a request: cheap to replay.
SHORT = (
    "capacity azure-conv --policy ar,max_batch=1 --arrival poisson --lengths fixed:512,1 --slo mean:e2el=150ms "
    "--num-requests 150 --precision"
)
QUEUE = f"{SHORT} 50%"
EXPECTED = {
    "dsim": __version__, "trace": "azure-conv", "seed": 3,
    "slos": ["mean:e2el=150ms", "ttft=1s"], "profile": "a100-sdar-8b", "estimated": True,
}  # fmt: skip
KEYS = ["schema", "version", "rate", "replicas", "binding_slo", "limited_by", "curve"]


def test_json_is_one_object_that_stands_alone_the_page_says_the_same_and_so_do_the_bytes_again() -> None:
    asked = f"{QUEUE} --seed 3 --slo ttft=1s"
    ran = succeed(asked, "--jobs 1 --json -o runs/queue")
    found = ran.json
    assert (list(found)[:7], found["binding_slo"], found["replicas"]) == (KEYS, "mean:e2el=150ms", 1)
    setup = found["setup"]
    assert {name: setup[name] for name in EXPECTED} == EXPECTED
    assert setup["command"] == f"dsim {asked}"
    assert found["rate"]["low"] < found["rate"]["value"] < found["rate"]["high"]
    # A request of one token has a first one, and no pace after it.
    seen = found["latency_ms"]
    assert 0 < seen["ttft"]["p50"] <= seen["ttft"]["p90"] <= seen["ttft"]["p99"]
    assert seen["tpot_chunk"] is None
    assert ran.err == "Wrote runs/queue/ (capacity.json, report.html)\n"
    assert sorted(os.listdir("runs/queue")) == sorted([*FILES, "replays.db"])
    assert json.loads(Path("runs/queue/capacity.json").read_text()) == found
    page = Path("runs/queue/report.html").read_bytes()
    text = html.unescape(page.decode())
    parts = [f"<code>{setup['command']}</code>", f"dsim {__version__}", "mean:e2el=150ms", "ttft p90"]
    for part in (*parts, "Estimated, not measured"):
        assert part in text
    assert b"src=" not in page.replace(b"<script src=", b"src=")[-4000:]
    assert dsim(asked, "--jobs 1 --json -o runs/queue --force").out == ran.out
    assert Path("runs/queue/report.html").read_bytes() == page
    assert "pass --force" in dsim(QUEUE, "-o runs/queue").refusal


def test_the_text_says_what_binds_what_limits_and_what_to_trust() -> None:
    ran = succeed(QUEUE, "--jobs 1", line_every=0.0005)
    assert re.search(r"^capacity( of 1 replica)?: \d+ replays, ", ran.err, re.M)
    lines = ran.out.splitlines()
    assert lines[0].startswith("ar,max_batch=1 sustains ")
    assert " at 95% confidence on 1 replica" in lines[0]
    for start in (
        "Binding SLO: mean:e2el=150ms (in ", "Limited by: activation budget, max_batch=1 (of the busy time: ",
    ):  # fmt: skip
        assert any(line.startswith(start) for line in lines)
    assert any(line.startswith("At capacity: median ttft ") and " ms, p90 " in line for line in lines)
    assert "Profile: a100-sdar-8b: estimated, not measured" in lines
    assert sum("meets all" in line for line in lines) >= 3


def test_a_rate_asks_for_replicas() -> None:
    quick = f"{SHORT} 30% --jobs 1 --json"
    one = dsim(quick).json["rate"]["value"]
    found = succeed(quick, f"--rate {1.5 * one:.3f} --max-replicas 8")
    assert found.json["replicas"] in (2, 3)
    assert found.json["rate"]["low"] >= 1.5 * one * 0.999


def test_an_input_error_leaves_no_folder() -> None:
    assert "precision is 90%" in dsim(QUEUE, "--precision 90% -o new/out").refusal
    Path("empty").mkdir()
    for out in ("new/out", "empty"):  # told after some replays
        assert "holds at no rate" in dsim(QUEUE, "--slo mean:e2el=0.1ms --jobs 1 -o", out).refusal
    assert held(Path.cwd()) == ["empty"]


def test_ctrl_c_keeps_the_replays_and_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dsim(QUEUE, "--jobs 1 --json").out
    module = sys.modules[CapacitySearch.__module__]
    search, calls = module.find, iter(range(1000))

    def stopped(*arguments: Any) -> Any:
        if next(calls) > 3:  # the pilot is one
            raise KeyboardInterrupt
        return search(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, "find", stopped)
        ran = dsim(QUEUE, "--jobs 1 -o out")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "Interrupted: the replays are kept in out/: the same command continues\n"
    assert dsim(QUEUE, "--jobs 1 -o out --json").out == whole


def test_the_page_draws_the_distance_to_every_bound_and_the_rate_asked_for() -> None:
    found = dsim(SHORT, "30% --jobs 1 --rate 20 --slo ttft=1s -o out --json").json
    page = Path("out/report.html").read_text()
    text = re.search(r'<script type="application/json" id="figures">(.*)</script>', page)
    chart = json.loads(text[1])["distance"]
    assert [line["name"] for line in chart["data"]] == list(found["bounds"]) == ["mean:e2el=150ms", "99% meet ttft=1s"]
    mean, share = (line["y"] for line in chart["data"])
    assert mean == pytest.approx([p["values"]["mean:e2el=150ms"] / 150 for p in found["curve"]])
    missed = [1 - p["values"]["99% meet ttft=1s"] for p in found["curve"]]
    assert share == pytest.approx([miss / 0.01 for miss in missed], abs=1e-6)
    sides = {note["text"]: (note["x"], note["xanchor"]) for note in chart["layout"]["annotations"] if "x" in note}
    assert sides["asked"][0] == 20 < sides["capacity"][0]
    assert (sides["asked"][1], sides["capacity"][1]) == ("right", "left")  # each label leads away from the other line
    places = [shape["x0"] for shape in chart["layout"]["shapes"] if shape.get("yref") == "paper"]
    assert 20 in places
    assert pytest.approx(found["rate"]["value"]) in places
