"""POLICY@PROFILE: policies of one comparison on profiles of their own."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from dsim.planner.candidates import candidates_of
from dsim.planner.grid import world_of
from dsim.planner.record import in_twin, record
from dsim.profiler.placed import placed
from dsim.profiler.profile import load
from dsim.report.run_page import run_page
from dsim.results.run import read_run
from dsim.results.world import World

from ..checks import refused
from ..cli.command import dsim

BASE = World("azure-conv", "ar", rate=2.0, num_requests=8)
SPECS = ("ar", "ar@h100-sdar-8b")


def test_an_at_sign_of_a_path_names_no_profile() -> None:
    assert placed("sparse-dllm,retention=0.3@rtx4090-llada-8b") == ("sparse-dllm,retention=0.3", "rtx4090-llada-8b")
    assert placed("chunk:8") == ("chunk:8", None)
    assert placed("my@home/mine.py:POLICY") == ("my@home/mine.py:POLICY", None)
    file = Path("mine@home.toml")
    file.write_text('policy = "ar"\n')
    assert placed(str(file)) == (str(file), None)
    assert placed(f"{file}@h100-sdar-8b") == (str(file), "h100-sdar-8b")


def test_a_policy_runs_on_the_profile_that_it_names() -> None:
    there = replace(BASE, policy=SPECS[1])
    told, wanted = there.run(), replace(BASE, profile="h100-sdar-8b").run()
    assert asdict(told) == asdict(wanted) | {"policy": SPECS[1]}
    assert asdict(told)["e2el_ms"] != asdict(BASE.run())["e2el_ms"]
    assert there.parsed_policy().name == SPECS[1]


def test_files_of_a_policy_and_its_profile_are_found_from_another_folder() -> None:
    Path("mine.toml").write_text('policy = "ar"\n')
    Path("p.json").write_text("{}")
    assert replace(BASE, policy="mine.toml@p.json").located().policy == f"{Path.cwd()}/mine.toml@{Path.cwd()}/p.json"
    assert replace(BASE, policy="ar@h100-sdar-8b").located().policy == "ar@h100-sdar-8b"


def test_a_sweep_sets_the_profile_that_its_policy_names() -> None:
    found = world_of(Path(), {"trace": "azure-conv", "policy": "chunk@h100-sdar-8b", "policy.chunk": 4})
    assert (found.policy, found.profile) == ("chunk,chunk=4", "h100-sdar-8b")


def test_a_plan_tries_a_placed_policy_on_its_own_profile_alone() -> None:
    def asked(policies: list[str], profiles: list[str]) -> list[tuple[str, str, str]]:
        given = [load(name) for name in profiles]
        found, _ = candidates_of(replace(BASE, slos=("ttft=1s",)), policies, given, lambda profile: None)
        return [(c.policy, c.profile.name, c.place) for c in found]

    assert asked(["chunk", "chunk@h100-sdar-8b"], ["a100-sdar-8b"]) == [
        ("chunk", "a100-sdar-8b", "A100-80GB"), ("chunk", "h100-sdar-8b", "H100")
    ]  # fmt: skip
    # Two profiles of one GPU, a script's and a server's, are told apart by their names.
    script, server = "rtx4090-48gb-llada-8b", "rtx4090-llada-8b"
    assert asked([f"sparse-dllm@{script}", f"dllm-serve@{server}"], []) == [
        ("sparse-dllm", script, "RTX4090-48GB"), ("dllm-serve", server, "RTX4090")
    ]  # fmt: skip
    with refused("policy chunk is given twice on a100-sdar-8b, expected once"):
        asked(["chunk", "chunk@a100-sdar-8b"], ["a100-sdar-8b"])
    with refused("two profiles are named a100-sdar-8b"):
        asked(["chunk"], ["a100-sdar-8b", "a100-sdar-8b"])
    said = dsim("plan azure-conv --slo ttft=1s --policy", SPECS[1], "--profile", "h100-sdar-8b").refusal
    assert said == "every policy names its own profile, expected none of --profile and --gpu: ar@h100-sdar-8b"
    said = dsim("tune azure-conv --slo ttft=1s --policy", SPECS[1]).refusal
    assert said.endswith("a search has one profile: expected --policy ar --profile h100-sdar-8b")


def test_a_profile_that_there_is_not_is_told_in_one_line() -> None:
    with refused("no-such"):
        replace(BASE, policy="ar@no-such").run()


def test_a_report_names_each_policys_profile() -> None:
    worlds = [replace(BASE, policy=spec) for spec in SPECS]
    record(worlds, BASE.requests(), in_twin, out="run")
    told = json.loads(Path("run/run.json").read_text())
    assert {policy: p["name"] for policy, p in told["profiles"].items()} == {
        SPECS[0]: "a100-sdar-8b", SPECS[1]: "h100-sdar-8b"
    }  # fmt: skip
    page = run_page(read_run("run"))
    profiles = [text for name, text in page.facts if name == "Profile"]
    assert profiles[0].startswith("a100-sdar-8b (")
    assert profiles[1].startswith("h100-sdar-8b (")
    assert [text.rpartition(" (")[2] for text in profiles] == [f"{spec})" for spec in SPECS]
    alone = record(worlds[1:], BASE.requests(), in_twin)
    assert [profile.name for profile in alone.profiles.values()] == ["h100-sdar-8b"]
