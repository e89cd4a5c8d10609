"""dsim plan, from arguments to what is printed, written, gone on with and refused."""

import contextlib
import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dsim import __version__
from dsim.live.shipped_configs import CONFIGS
from dsim.planner import plan_replays
from dsim.planner.plan_result import FILES
from dsim.profiler.profile import load, save

from ..stored import change, rows
from .command import dsim, held, succeed

# A queue of one prefill step a request: cheap to replay.
ASKED = "--arrival poisson --lengths fixed:512,1 --slo mean:e2el=150ms --num-requests 100 --rate 30"
QUEUE = f"plan azure-conv --profile ar.json --policy ar,max_batch=1 --policy ar,max_batch=8 {ASKED}"


@pytest.fixture(autouse=True)
def _an_autoregressive_profile() -> None:
    save(replace(load("a100-sdar-8b"), family="autoregressive"), "ar.json")


PRICED = f"{QUEUE} --gpu-hour 2 --jobs 1"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A plan without spares or an ensemble, as JSON, and its folder."""
    folder = tmp_path_factory.mktemp("plain")
    with contextlib.chdir(folder):
        save(replace(load("a100-sdar-8b"), family="autoregressive"), "ar.json")
        return dsim(PRICED, "--json -o out").json, folder / "out"


SHEET = 'name = "Mine"\nsource = "a data sheet of mine"\nbf16_tflops = 500\nbandwidth_gb_s = 4000\nmemory_gb = 96\n'


def test_the_text_says_what_to_run_what_it_costs_and_what_could_change_it() -> None:
    ran = succeed(PRICED, line_every=0.05)
    assert any(" replays; " in line for line in ran.err.splitlines())  # how far it is
    lines = ran.out.splitlines()
    assert re.fullmatch(
        r"\d+ × A100-80GB, [\d.]+ USD an hour, [\d,]+ USD a month, meets? the target for mean:e2el [\d.]+ ms "
        r"\([\d.]+ to [\d.]+\), with room for .*; no released engine is known to run this policy\.",
        lines[0],
    )
    assert lines[1].startswith("30 req/s within mean:e2el=150ms: ar,max_batch=8 on ")
    assert any(line.startswith("Runner-up: ar,max_batch=1") for line in lines[2:4])
    assert "Profile: a100-sdar-8b: estimated, not measured" in lines
    for risk in ("30% more traffic", "a replica lost", "a profile 20% slower"):
        assert any(line.strip().startswith(risk) for line in lines)
    assert '  policy = "ar"' in lines
    assert "  max_batch = 8" in lines


def test_json_is_one_object_that_stands_alone_and_the_page_says_the_same() -> None:
    asked = f"{QUEUE} --gpu-hour 2 --currency EUR --seed 3"
    ran = succeed(asked, "--jobs 1 --json -o runs/plan")
    found = ran.json
    assert found["schema"] == "dsim-plan"
    setup = found["setup"]
    known = ("dsim", "trace", "seed", "currency", "slos", "estimated")
    assert [setup[name] for name in known] == [__version__, "azure-conv", 3, "EUR", ["mean:e2el=150ms"], True]
    assert (found["rate"], found["ranking"][0]["price"]) == (30.0, 2.0)
    assert setup["command"] == f"dsim {asked}"
    assert ran.err == "Wrote runs/plan/ (plan.toml, plan.json, report.html)\n"
    assert held(Path("runs/plan")) == sorted([*FILES, "replays.db"])
    assert json.loads(Path("runs/plan/plan.json").read_text()) == found
    page = html.unescape(Path("runs/plan/report.html").read_text())
    for part in (setup["command"], "EUR an hour", "Estimated, not measured", "mean:e2el"):
        assert part in page
    assert found["ranking"][0]["policy"] in page


def test_a_plan_goes_on_from_what_it_has_and_gives_the_same_bytes() -> None:
    asked = f"{QUEUE} --jobs 1 --json -o out"
    whole = dsim(asked)
    page = Path("out/report.html").read_bytes()
    kept = rows(Path("out/replays.db"))
    change(Path("out/replays.db"), f"DELETE FROM replays WHERE key > '{kept[3][0]}'")
    for name in FILES:
        Path("out", name).unlink()
    again = dsim(asked)
    assert again.out == whole.out
    assert Path("out/report.html").read_bytes() == page
    assert re.search(r"^\d+ answers, \d+ of them from the store$", again.err, re.MULTILINE)
    assert rows(Path("out/replays.db")) == kept
    asked += " --seed 1"
    assert dsim(asked).refusal.startswith("out/replays.db holds another plan, or a file that it names has changed: ")
    never = dsim(asked, "--slo mean:e2el=0.1ms --max-replicas 1 --force")
    assert "no fleet of up to 1 replicas meets the SLOs" in never.refusal
    assert Path("out/report.html").read_bytes() == page
    succeed(asked, "--force")


def test_ctrl_c_keeps_the_replays_and_ends_with_130() -> None:
    original, calls = plan_replays._do, iter(range(100))

    def stopped(cell: Any) -> Any:
        if next(calls) >= 3:
            raise KeyboardInterrupt
        return original(cell)

    with mock.patch.object(plan_replays, "_do", stopped):
        ran = dsim(QUEUE, "--jobs 1 -o out")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "Interrupted: the replays are kept in out/: the same command continues\n"
    assert len(rows(Path("out/replays.db"))) >= 3
    succeed(QUEUE, "--jobs 1 -o out")


@pytest.mark.slow
def test_plan_toml_and_the_profiles_of_data_sheets_are_what_other_commands_take() -> None:
    Path("mine.toml").write_text(SHEET)
    Path("config.json").write_text(json.dumps({**CONFIGS["sdar-8b"], "_name_or_path": "acme/mine-8B"}))
    sheets = "--gpu mine.toml,h100 --model config.json --yields a100-sdar-8b"
    asked = "--policy chunk,max_batch=8 --policy chunk,max_batch=4 --jobs 1 --json --gpu-hour mine=1,h100=3 -o out"
    ran = succeed("plan azure-conv", ASKED, sheets, asked)
    assert {fleet["device"] for fleet in ran.json["ranking"] + ran.json["left_out"]} == {"Mine", "H100"}
    assert ran.json["setup"]["estimated"] is True
    profile = load("out/profile-mine-mine-8b.json")
    assert (profile.model.name, profile.device.name, profile.verdict) == ("mine-8B", "Mine", "estimated, not measured")
    assert profile.provenance.sources[0] == "a data sheet of mine"
    again = succeed(
        "replay azure-conv --policy out/plan.toml --profile out/profile-mine-mine-8b.json --num-requests 20",
        "--lengths fixed:512,1",
    )  # fmt: skip
    assert f"{ran.json['ranking'][0]['replicas']} replica" in again.out


def test_spare_replicas_are_bought_and_growth_has_an_end(plain: tuple[Any, Path]) -> None:
    shutil.copytree(plain[1], "out")
    asked = f"{PRICED} --spare 1 --growth 30%/year -o out"
    ran = dsim(asked, "--json")
    found, before = ran.json["ranking"][0], plain[0]["ranking"][0]
    assert (found["replicas"], found["spare"]) == (before["replicas"], 1)
    assert found["per_hour"] == 2.0 * found["gpus"] == before["per_hour"] + 2.0
    assert (found["values"], found["headroom"]) == (before["values"], before["headroom"])  # of the fleet without it
    toml = Path("out/plan.toml").read_text()
    assert toml.startswith("# The SLOs are met without the spare: 1 of the replicas.\npolicy = ")
    assert f"replicas = {found['replicas'] + 1}\n" in toml
    assert next(risk for risk in ran.json["risks"] if risk["change"] == "a replica lost")["verdict"] == "meets"
    assert ran.json["growth"]["low"] < ran.json["growth"]["high"]
    assert plain[0]["growth"] is None
    assert "\nIf traffic grows by 30 % a year, " in dsim(asked, "--force").out


def test_a_gate_on_today_s_fleet_ends_with_1_if_it_misses_an_slo(plain: tuple[Any, Path]) -> None:
    shutil.copytree(plain[1], "out")
    asked = f"{PRICED} -o out --fail-on-slo --today"
    ran = dsim(asked, "ar,max_batch=1,replicas=1 --json")
    assert (ran.code, ran.json["today"]["gpus"], ran.json["today"]["per_hour"]) == (1, 1, 2.0)
    assert "ar,max_batch=1,replicas=1 misses mean:e2el=150ms" in ran.err
    assert succeed(asked, "ar,max_batch=8,replicas=8").out.count("What runs today") == 1
    assert "--fail-on-slo is given without --today" in dsim(PRICED, "--fail-on-slo").refusal


def test_an_ensemble_says_under_which_share_of_the_profiles_the_fleet_holds(plain: tuple[Any, Path]) -> None:
    shutil.copytree(plain[1], "out")
    assert "drawn profiles" not in Path("out/report.html").read_text()
    ran = dsim(PRICED, "--ensemble 3 --json -o out")
    told = ran.json["ensemble"]
    assert (told["num"], told["metric"], told["level"]) == (3, "mean:e2el (ms)", 0.5)
    best, other = told["intervals"]
    values = told["intervals"][best]
    assert values["mean:e2el (ms)"]["low"] < values["mean:e2el (ms)"]["high"]
    rows = ran.json["ranking"][:2]
    costs = [told["intervals"][name]["cost an hour"]["value"] for name in (best, other)]
    assert costs == [row["per_hour"] for row in rows]
    assert values["replicas needed"]["value"] == rows[0]["replicas"]
    assert told["ratios"][other]["cost an hour"]["value"] == costs[0] / costs[1]
    page = Path("out/report.html").read_text()
    said = f"meets the SLOs at 30 req/s under {100 * told['survives']:.0f} % of 3 drawn profiles."
    assert said.replace("meets", "meet") in page or said in page
    assert page.index(f"The cost an hour of {best} is ") < page.index("What the answer depends on")


def test_a_policy_that_the_checkpoint_cannot_run_is_left_out_by_name_and_the_others_go_on() -> None:
    ran = dsim(QUEUE, "--policy dllm-serve --jobs 1 --json")
    assert {row["policy"]: row["dropped"] for row in ran.json["left_out"]}["dllm-serve"].startswith(
        "profile a100-sdar-8b is of family autoregressive, and dllm-serve"
    )
    assert ran.json["ranking"][0]["policy"] == "ar,max_batch=8"
    few = dsim("plan azure-conv", ASKED, "--slo ttft=9s --attainment 99.9% --num-requests 1000")
    assert few.err.endswith("Error: number of requests is 1000, expected 1177 to 10000000 a replay\n")
    alone = dsim("plan azure-conv --policy dllm-serve", ASKED).refusal
    assert "dllm-serve: profile a100-sdar-8b is of family block-diffusion" in alone
