"""What commands print: options that they have, verdicts that their numbers bear out, and the README's figures."""

import csv
import re
import statistics
from pathlib import Path

import typer

from dsim.cli import app
from dsim.report.reproduce import _percent
from dsim.traces import load, write

from . import pages
from .command import Ran, dsim

ASKED: dict[str, list[object]] = {
    "replay": ["--policy", "lmdeploy-bd32", "--slo", "95%:ttft=300ms", "--slo", "p90:norm_latency=20ms"],
    "capacity": [
        "--policy", "optimus", "--slo", "norm_latency=200ms", "--precision", "50%", "--num-requests", 100, "--jobs", 1,
    ],
    "plan": [
        "--policy", "optimus", "--policy", "lmdeploy-bd32", "--slo", "ttft=4s", "--slo", "p90:norm_latency=100ms",
        "--rate", 2, "--num-requests", 40, "--jobs", 1,
    ],
    "tune": ["--slo", "ttft=4s", "--trials", 2, "--replications", 2],
}  # fmt: skip
EXPONENT = re.compile(r"\d(?:\.\d+)?e[+-]\d")
SHARE = re.compile(r"(?P<value>[\d.]+) %(?: \([\d.]+ to [\d.]+\))?, (?P<verdict>meets|misses) them")


def own_options(name: str) -> set[str]:
    command = getattr(typer.main.get_command(app), "commands")[name]  # noqa: B009 - only a group has it
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def read(name: str, ran: Ran) -> None:
    """Hold what a command printed to its options and to itself."""
    text = ran.out + ran.err
    assert not EXPONENT.search(text), text
    assert "± 0 " not in text
    elsewhere = re.findall(r"`dsim (\w[\w-]*) ([^`]*)`", text)
    for other, words in elsewhere:
        assert set(re.findall(r"--[a-z][a-z-]+", words)) <= own_options(other), f"dsim {other} {words}"
    here = re.sub(r"`dsim [^`]*`", "", text)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", here)) <= own_options(name), here
    for said in SHARE.finditer(text):
        assert said["verdict"] == ("meets" if float(said["value"]) >= 99 else "misses"), said[0]
    for value, verdict in re.findall(r"([\d,.]+) (?:ms|%) (met|not met)", text):
        bound = 95.0 if f"{value} % {verdict}" in text else -20.0
        number = float(value.replace(",", "")) * (1 if bound > 0 else -1)
        assert (number >= bound) == (verdict == "met"), f"{value} {verdict}"


def test_what_every_planning_command_prints_agrees_with_itself_and_its_options() -> None:
    write(load("azure-conv").head(150), Path("few.jsonl"))
    for name, words in ASKED.items():
        ran = dsim(name, "few.jsonl", *words)
        assert ran.code == 0, ran.err
        read(name, ran)


def test_the_readme_says_what_reproduce_prints_of_its_calibration() -> None:
    with (pages.ROOT / "reproduce" / "recorded.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == "focus-throughput"]
    errors = [abs(float(row["error"])) for row in rows if row["status"] == "calibrated" and row["error"]]
    said = f"is off by {_percent(statistics.median(errors))} in the median and {_percent(max(errors))} at most"
    assert said in " ".join((pages.ROOT / "README.md").read_text(encoding="utf-8").split())
