"""dsim tune, from arguments to what is printed, written and refused."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest

from ..checks import cases
from ..held_up import PATIENCE, TUNE, start, wait_until
from ..stored import rows as stored
from .command import Ran, dsim, held, rows, succeed

FILES = ["policy.toml", "replays.db", "report.html", "trials.csv", "tune.json"]
SPACE = 'policy = ["optimus", "chunk"]\nchunk = [4, 16]\nmax_batch = ["none", 32]\n'


@pytest.fixture(autouse=True)
def _files(two_replications: None) -> None:
    Path("trace.jsonl").write_text(rows(120))
    Path("space.toml").write_text(SPACE)


def tune(*more: object) -> Ran:
    return dsim("tune trace.jsonl --space space.toml --slo norm_latency=20ms --trials 4", *more)


@pytest.mark.slow
def test_a_search_ends_in_a_policy_that_replay_takes() -> None:
    ran = tune("-o tuned --policy lmdeploy-bd32")
    assert (ran.code, ran.err) == (0, "Wrote tuned/ (policy.toml, tune.json, trials.csv, report.html)\n")
    assert held(Path("tuned")) == FILES
    info = json.loads(Path("tuned/tune.json").read_text())
    recommended = info["winner" if info["confirmed"] else "default"]
    assert ran.out.startswith(f"{info['winner']['policy']}: ")
    assert "Profile: a100-sdar-8b: estimated, not measured\n" in ran.out
    replayed = dsim("replay trace.jsonl --policy tuned/policy.toml --json")
    spelt = dsim("replay trace.jsonl --policy", recommended["policy"], "--json")
    [by_file], [by_spec] = replayed.json["policies"], spelt.json["policies"]
    assert {**by_file, "policy": ""} == {**by_spec, "policy": ""}
    with Path("tuned/trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(info["trials"]) == 4
    assert {row["state"] for row in table} == {"complete"}
    page = Path("tuned/report.html").read_text()
    assert "https://" not in page.split("</script>")[-2]
    for part in (info["winner"]["policy"], "Estimated, not measured.", "Quality unknown.", 'id="history"'):
        assert part in page


@pytest.mark.slow
def test_json_is_one_object_and_the_same_seed_gives_the_same_bytes() -> None:
    first, again = tune("--json"), tune("--json")
    assert (first.out, first.json["default"]["policy"]) == (again.out, "lmdeploy-bd32")
    assert (first.json["default"]["quality"]["relative"], first.json["unit"]) == (1.0, "req/s")
    other = tune("--json --seed 1 --policy lmdeploy-0.18")
    assert other.json["setup"]["seed"] == 1
    assert other.err == (
        "Warning: lmdeploy-0.18: threshold is 0.85, the engine's own, but a100-sdar-8b holds yields for "
        "sharegpt-focus at 0.9: these are used\n"
    )


@pytest.mark.slow
def test_more_trials_go_on_from_the_replays_that_are_kept_and_no_mistake_loses_them() -> None:
    assert tune("-o tuned").code == 0
    store = Path("tuned/replays.db")
    kept = stored(store)
    for more, message in (
        ("--jobs 0", "jobs is 0, expected at least 1"),
        ("--ray 127.0.0.2:1", "ray is 127.0.0.2:1, expected HOST:PORT of a running Ray cluster, or auto: "),
        ("--seed 1", "tuned/replays.db holds another search, or a file that it names has changed: "),
    ):
        assert tune("-o tuned --trials 5", more).refusal.startswith(message)
        assert stored(store) == kept
    again = tune("-o tuned --trials 5")
    assert (again.code, " of them from the store\n" in again.err) == (0, True)
    assert len(stored(store)) > len(kept)
    assert len(Path("tuned/trials.csv").read_text().splitlines()) == 6
    assert tune("-o tuned --seed 1 --force").code == 0


def test_a_search_begins_with_a_policy_of_the_profile_s_kind() -> None:
    ran = dsim("tune trace.jsonl --profile h100-qwen3-8b-ar --policy vllm-ar --slo ttft=9s --trials 2 --jobs 1 --json")
    assert (ran.code, ran.err, ran.json["default"]["policy"]) == (0, "", "vllm-ar")


@pytest.mark.slow
def test_ctrl_c_keeps_the_replays_and_says_how_to_go_on() -> None:
    command = "tune trace.jsonl --space space.toml --trials 6 --slo norm_latency=20ms --jobs 2"
    running = start(TUNE, *f"{command} -o tuned".split(), folder=Path("gate"), num_passes=5)
    store = Path("tuned/replays.db")
    wait_until(lambda: len(stored(store)) == 1 + 5, running)  # the first: which search it is
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out) == (130, "")
    assert err == "Interrupted: the replays are kept in tuned/: the same command continues\n"
    assert len(stored(store)) == 1 + 5
    # Gone on with, it ends as one that was never stopped.
    assert "5 of them from the store\n" in dsim(command, "-o tuned").err
    succeed(command, "-o whole")
    for name in ("tune.json", "trials.csv", "policy.toml"):
        assert Path(f"tuned/{name}").read_bytes() == Path(f"whole/{name}").read_bytes()


@pytest.mark.slow
@cases("name", "age_capped", "dilaserve", "dws")
def test_a_policy_in_under_40_lines_of_python_is_replayed_tuned_and_served_live(name: str) -> None:
    file = Path(__file__).parents[2] / "examples" / "policies" / f"{name}.py"
    assert len(file.read_text().splitlines()) < 40
    spec = f"{file}:POLICY"
    assert dsim("replay trace.jsonl --policy", spec, "--json").json["policies"][0]["completed"] == 120
    Path("space.toml").write_text(f'policy = ["{spec}"]\npatience = [1, 4, 16]\n')
    assert (tune("-o tuned --policy", spec).code, spec in Path("tuned/policy.toml").read_text()) == (0, True)
    traffic = "--num-requests 3 --lengths fixed:32,32 --arrival poisson --rate 4"
    served = dsim("live trace.jsonl --model tiny -o live", traffic, "--policy", spec)
    assert (served.code, held(Path("live"))) == (0, ["report.html", "requests.parquet", "run.json", "steps.parquet"])
