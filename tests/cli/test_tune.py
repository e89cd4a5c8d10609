"""dsim tune, from arguments to what is printed, written and refused."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .command import Ran, dsim, held, rows

FILES = ["policy.toml", "report.html", "study.journal", "trials.csv", "tune.json"]
SPACE = 'policy = ["optimus", "chunk"]\nchunk = [4, 16]\nmax_batch = ["none", 32]\n'


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(rows(200))
    Path("space.toml").write_text(SPACE)


def tune(*more: object) -> Ran:
    return dsim(
        "tune", "trace.jsonl", "--space", "space.toml", "--slo", "norm_latency=20ms", "--trials", 4,
        "--replications", 2, *more,
    )  # fmt: skip


def test_a_search_ends_in_a_policy_that_replay_takes() -> None:
    ran = tune("-o", "tuned", "--policy", "ar")
    assert (ran.code, ran.err) == (0, "Wrote tuned/ (policy.toml, tune.json, trials.csv, report.html)\n")
    assert held(Path("tuned")) == FILES
    info = json.loads(Path("tuned/tune.json").read_text())
    assert ran.out.startswith(f"{info['winner']['policy']}: ")
    assert "Profile a100-sdar-8b is estimated, not measured." in ran.out
    assert "Note: the quality of the recommended policy is unknown: no score is published for" in ran.out
    replayed = dsim("replay", "trace.jsonl", "--policy", "tuned/policy.toml", "--json")
    spelt = dsim("replay", "trace.jsonl", "--policy", info["recommended"]["policy"], "--json")
    [by_file], [by_spec] = replayed.json["policies"], spelt.json["policies"]
    assert {**by_file, "policy": ""} == {**by_spec, "policy": ""}
    with Path("tuned/trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == info["num_trials"] == 4
    assert {row["state"] for row in table} == {"complete"}
    page = Path("tuned/report.html").read_text()
    assert "https://" not in page.split("</script>")[-2]
    for part in (
        info["winner"]["policy"],
        "Estimated, not measured.",
        "Quality unknown.",
        'id="history"',
        'id="gains"',
    ):
        assert part in page


def test_json_is_one_object_and_the_same_seed_gives_the_same_bytes() -> None:
    first, again = tune("--json"), tune("--json")
    assert first.out == again.out
    assert first.json["default"]["policy"] == "lmdeploy-bd32"
    assert first.json["default"]["quality"]["relative"] == 1.0
    assert first.json["objectives"] == {"goodput": "req/s"}
    assert tune("--json", "--seed", 1).json["seed"] == 1


def test_two_objectives_give_a_front_and_a_policy_for_each_of_its_settings() -> None:
    ran = tune("--objective", "throughput", "--objective", "latency", "-o", "tuned")
    assert ran.code == 0
    info = json.loads(Path("tuned/tune.json").read_text())
    names = [f"front-{i}.toml" for i in range(1, len(info["front"]) + 1)]
    assert held(Path("tuned")) == sorted([*FILES, *names])
    assert 'id="front"' in Path("tuned/report.html").read_text()


def test_more_trials_go_on_from_those_that_are_kept() -> None:
    assert tune("-o", "tuned").code == 0
    first = Path("tuned/trials.csv").read_text()
    assert tune("-o", "tuned", "--trials", 5).code == 0
    assert Path("tuned/trials.csv").read_text().startswith(first.split("\n")[0])
    assert len(Path("tuned/trials.csv").read_text().splitlines()) == 6
    ran = tune("-o", "tuned", "--seed", 1)
    assert (ran.code, ran.err) == (
        2,
        "Error: tuned/study.journal holds another search: its seed is 0, this one's is 1; choose another --storage\n",
    )
    assert tune("-o", "tuned", "--seed", 1, "--force").code == 0


def test_a_folder_of_something_else_is_not_touched() -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("dear diary")
    ran = tune("-o", "mine")
    assert (ran.code, ran.err) == (2, "Error: mine exists: choose another folder, or pass --force to replace it\n")
    assert held(Path("mine")) == ["notes.txt"]


def test_min_quality_keeps_to_what_is_known() -> None:
    Path("space.toml").write_text('policy = ["lmdeploy-bd32", "optimus"]\nmax_batch = ["none", 32]\n')
    ran = tune("--min-quality", "98%")
    assert ran.code == 0
    assert "Note: optimus is left out: its quality is unknown: no score is published for optimus on SDAR-8B" in ran.out
    allowed = tune("--min-quality", "98%", "--allow-unknown-quality", "--json")
    assert {f["policy"].split(",")[0] for f in (allowed.json["winner"], allowed.json["runner_up"])} <= {
        "optimus",
        "lmdeploy-bd32",
    }
    Path("scores.csv").write_text("policy,score,baseline\noptimus,99.5,100\n")
    own = tune("--min-quality", "99%", "--quality-table", "scores.csv", "--policy", "ar", "--json")
    assert own.json["winner"]["quality"]["relative"] in (0.995, 1.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "speed"], "no objective is named speed, expected one of goodput, throughput, cost, latency"),
        (["--objective", "cost"], "--gpu-hour is None, expected a price above 0 where cost is an objective"),
        (["--policy", "optimos"], "policy 'optimos': no preset is named 'optimos' (did you mean optimus?)"),
        (["--space", "none.toml"], "none.toml: no such space file"),
        (["--min-quality", "lots"], "quality lots is not a share of the full cache's, expected such as 98% or 0.98"),
        (["--quality-table", "none.csv"], "none.csv: cannot be read as a quality table"),
        (["--storage", "trace.jsonl"], "trace.jsonl holds no trials of dsim tune, expected another file"),
        (["--slo", "p90:ttft=1us"], "misses it by"),
    ],
)
def test_bad_input_is_one_line(more: list[str], message: str) -> None:
    ran = tune(*more)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def ended(journal: Path) -> int:
    """Trials in a journal that ended with a value."""
    return journal.read_text().replace(" ", "").count('"values":[') if journal.exists() else 0


def test_ctrl_c_keeps_the_trials_and_says_how_to_go_on() -> None:
    Path("trace.jsonl").write_text(rows(600))
    command = [
        sys.executable, "-m", "dsim", "tune", "trace.jsonl", "--slo", "norm_latency=20ms", "-o", "tuned",
        "--replications", "2",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "--trials", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    journal = Path("tuned/study.journal")
    while time.monotonic() < deadline and ended(journal) < 3:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "Interrupted: the trials are kept in tuned/study.journal: the same command goes on from them\n"
    assert ended(journal) >= 3
    again = subprocess.run([*command, "--trials", "5"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert len(Path("tuned/trials.csv").read_text().splitlines()) >= 5
