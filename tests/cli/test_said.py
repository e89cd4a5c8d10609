"""What commands print: options that they have, and the README's figures."""

import csv
import re
import statistics

import pytest

from dsim.benchmarks import readme_answers
from dsim.research.reproduce.reproduce_page import _percent
from dsim.traces import load, write

from ..checks import cases
from . import pages, said
from .command import dsim

CLIENTS = pages.ROOT / "tests" / "comparison" / "clients"
# What no page's command prints; later commands read what the first one wrote.
OTHERS = (
    "replay few.jsonl --policy lmdeploy-bd32 --policy chunk:8 --num-requests 60 --slo 95%:ttft=300ms "
    "--slo p90:norm_latency=20ms --slo 50%:ttft=2s -o run",
    f"import {CLIENTS}/aiperf.jsonl --trace {CLIENTS}/trace.jsonl --slo ttft=110ms",
)
# Of these only refusals are read: they need a network, or serve until they are told to end.
NOT_RUN = {"follow"}
REFUSED = """
replay few.jsonl --policy nothing
replay few.jsonl --profile nothing
replay nothing.jsonl
replay few.jsonl -o run
replay few.jsonl --slo 90
plan few.jsonl --rate 2
capacity few.jsonl --slo ttft=1ms --num-requests 40 --jobs 1
capacity few.jsonl
tune few.jsonl --objective nothing
compare run nothing
import few.jsonl
sweep few.jsonl -o other
profile --roofline H100 -o other.json
profile --client few.jsonl
live few.jsonl --model nothing
serve --twin nothing
serve
follow ftp://nothing --policy ar
validate --model nothing -o v
trace info nothing
""".strip().splitlines()


def name_of(words: str) -> str:
    return said.named(words)[0]


@pytest.mark.slow
def test_what_commands_print_and_refuse_names_their_own_options() -> None:
    write(load("azure-conv").head(150), "few.jsonl")
    for code, commands in ((0, OTHERS), (2, REFUSED)):
        for words in commands:
            ran = dsim(words)
            assert ran.code == code, ran
            said.check_options(name_of(words), ran.out + ran.err)


def test_every_command_is_read_or_named_as_refused_only() -> None:
    blocks = [block for page in pages.PAGES for block in pages.blocks(page)]
    lines = [line for block in blocks if block.language == "sh" and block.reason is None for line in block.lines]
    shown = {said.named(line.partition("dsim ")[2])[0] for line in lines}
    assert shown | set(map(name_of, OTHERS)) | NOT_RUN >= {name for name, _ in said.every_command()}


def test_the_readme_says_how_far_the_calibration_is_off() -> None:
    with (pages.ROOT / "research" / "reproduce" / "recorded.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == "focus-throughput"]
    errors = [abs(float(row["error"])) for row in rows if row["status"] == "calibrated" and row["error"]]
    told = f"is off by {_percent(statistics.median(errors))} in the median and {_percent(max(errors))} at most"
    assert told in " ".join((pages.ROOT / "README.md").read_text().split())


WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = {word: number for number, word in enumerate(WORDS, 1)}
SHARES = {
    "a third": 1 / 3, "half": 1 / 2, "a quarter": 1 / 4, "two thirds": 2 / 3, "three quarters": 3 / 4,
    "three eighths": 3 / 8,
}  # fmt: skip
AGAIN = "run `python benchmarks/readme_answers.py`"


def numbers(text: str) -> set[float]:
    """The numbers of a text, in digits or words."""
    digits = {float(found.replace(",", "")) for found in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", text)}
    return digits | {float(NUMBERS[word]) for word in re.findall(r"[a-z]+", text.lower()) if word in NUMBERS}


@pytest.mark.slow
@cases("name", *readme_answers.COMMANDS)
def test_the_readmes_answers_are_those_of_its_commands(name: str) -> None:
    kept, command = readme_answers.kept()[name], readme_answers.COMMANDS[name]()
    assert kept["command"].split()[1:] == command, f"another command stands there now: {AGAIN}"
    assert kept["digest"] == readme_answers.digest(command, kept["plan"]), f"the rules have changed: {AGAIN}"


def test_what_the_readme_says_of_a_new_scheduler_is_what_the_second_command_found() -> None:
    plan = readme_answers.kept()["second"]["plan"]
    best, other = plan["ranking"]
    readme = (pages.ROOT / "README.md").read_text()
    words = " ".join(readme.partition("And what would a new scheduler be worth?")[2].partition("\n\n")[0].split())
    [told] = re.findall(r"The same traffic .*?\.(?= )", words)
    asked, _, fleets = told.partition(" needs ")
    assert {float(plan["gpu_hour"])} <= numbers(asked)
    assert (plan["rate"], plan["slos"]) == (12.0, ["ttft=2s", "norm_latency=100ms"])
    gpus = [NUMBERS[word] for word in re.findall(r"[a-z]+", fleets) if word in NUMBERS]
    policies = re.findall(r"`(.*?)`", fleets)
    assert list(zip(policies, gpus, strict=True)) == [
        (fleet["policy"].partition(",")[0], fleet["gpus"]) for fleet in (other, best)
    ]
    [share] = re.findall(rf"save ({'|'.join(SHARES)}) of the bill", words)
    assert 1 - best["per_hour"] / other["per_hour"] == pytest.approx(SHARES[share], abs=0.02)


def test_the_readmes_figures_are_those_that_its_first_command_printed() -> None:
    kept, readme = readme_answers.kept()["first"], (pages.ROOT / "README.md").read_text()
    plan, printed = kept["plan"], " ".join(" ".join(kept["printed"]).split())
    assert readme_answers.PICTURE.read_text() == readme_answers.svg(plan), AGAIN
    assert f"![{readme_answers.title(plan)}](docs/images/answer.svg)" in readme, AGAIN
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
    assert " ".join(shown[1].replace("\\\n", " ").split()) in printed.replace("\\ ", "")
