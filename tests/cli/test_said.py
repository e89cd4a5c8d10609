"""What commands print: options that they have, verdicts that their numbers bear out, and the README's figures."""

import csv
import re
import statistics
from pathlib import Path

import pytest
import typer

from dsim.benchmarks import answer
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


WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = {word: number for number, word in enumerate(WORDS, 1)}
SHARES = {"a third": 1 / 3, "half": 1 / 2, "a quarter": 1 / 4, "two thirds": 2 / 3, "three quarters": 3 / 4}
AGAIN = "run `python benchmarks/answer.py`"


def numbers(text: str) -> set[float]:
    """The numbers of a text, in digits or words."""
    digits = {float(found.replace(",", "")) for found in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", text)}
    return digits | {float(NUMBERS[word]) for word in re.findall(r"[a-z]+", text.lower()) if word in NUMBERS}


def test_the_readmes_answer_is_that_of_its_first_command() -> None:
    kept = answer.kept()
    assert kept["command"].split()[1:] == answer.first_command(), f"the README asks something else now: {AGAIN}"
    assert kept["digest"] == answer.digest(answer.first_command(), kept["plan"]), f"the rules have changed: {AGAIN}"


def test_the_readmes_figures_are_those_that_its_first_command_printed() -> None:
    kept, readme = answer.kept(), (pages.ROOT / "README.md").read_text(encoding="utf-8")
    plan, printed = kept["plan"], " ".join(" ".join(kept["printed"]).split())
    assert answer.PICTURE.read_text(encoding="utf-8") == answer.svg(plan), AGAIN
    assert f"![{answer.title(plan)}](docs/images/answer.svg)" in readme, AGAIN
    words = " ".join(
        readme.partition("](docs/images/answer.svg)")[2].partition("And what would a new scheduler")[0].split()
    )
    # Each part of the answer is of one fleet, in the ranking's order, and has its GPUs and its cost.
    [told] = re.findall(r"\*\*(.*?)\*\*", words)
    for part, fleet in zip(re.split(r"; ", told), plan["ranking"], strict=True):
        assert {fleet["gpus"], fleet["per_hour"]} <= numbers(part), part
    costs = sorted(fleet["per_hour"] for fleet in plan["ranking"])
    for share in re.findall(rf"({'|'.join(SHARES)}) of the bill", words):
        assert 1 - costs[0] / costs[-1] == pytest.approx(SHARES[share], abs=0.02)
    for price in re.findall(r"([\d.]+) dollars", words):
        assert float(price) in {float(plan["gpu_hour"] or 0), *costs}, price
    for rate in re.findall(r"([\d.]+) requests a second", words):
        assert float(rate) == plan["rate"]
    # The launch command is the one that it printed.
    shown = re.search(r"```text\n(.*?)\n```", readme, re.S)
    assert shown is not None
    assert " ".join(shown[1].replace("\\\n", " ").split()) in printed.replace("\\ ", "")
