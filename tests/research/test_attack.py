"""A slice of the attack with fixed seeds; `python -m dsim.research.attack --minutes 60` is the whole."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.research.attack import disasters, fuzz
from dsim.research.attack.targets import Target, targets

from ..checks import cases

pytestmark = pytest.mark.slow
NAMES: tuple[str, ...] = (
    "trace mooncake", "trace guidellm", "trace json", "trace azure",
    "trace burstgpt", "trace litellm", "trace responses", "trace own columns", "trace engine's log",
    "trace parquet", "profile", "step log", "policy file", "policy", "sweep file",
    "space file", "quality table", "run.json", "run's Parquet", "validation.json", "load generator",
    "Prometheus", "SLO, bound, duration, lengths", "data sheet", "model's shape", "yield",
    "store of replays", "manifest", "request",
    *(("request, tokenized",) if find_spec("tokenizers") else ()), "command line",
    "command's files",
)  # fmt: skip
if find_spec("torch"):
    NAMES += ("model config", "tokenizer", "prompts", "safetensors")
NAMES += ("worlds",)


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[dict[str, Target], Path]]:
    with fuzz.workplace() as (work, folder):
        yield {target.name: target for target in targets(work)}, folder


def test_every_target_is_attacked(places: tuple[dict[str, Target], Path]) -> None:
    assert tuple(name for name, target in places[0].items() if target.weight) == NAMES


def test_hostile_clients_cost_no_honest_request(places: tuple[dict[str, Target], Path]) -> None:
    target, folder = places[0]["hostile clients"], places[1]
    found = fuzz.Found()
    for seed in range(5):
        fuzz.attack_once(target, seed, folder, found)
    assert found.faults == {}


# By name the seed of one input; `python -m dsim.research.attack --only paths` and `--only failures` are the whole.
AGREEING: tuple[tuple[str, int], ...] = (
    ("paths: compiled and plain", 1), ("paths: without numba", 1), ("paths: -o and not", 1),
    ("paths: resumed and whole", 2), ("paths: one process and many", 0), ("failures: live loop", 2),
    ("failures: served", 1),
)  # fmt: skip
if find_spec("torch"):
    AGREEING += (("failures: live", 1),)


def test_every_slow_target_has_a_slice(places: tuple[dict[str, Target], Path]) -> None:
    assert {n for n, target in places[0].items() if not target.weight} == {"hostile clients", *dict(AGREEING)}


@cases("name seed", *AGREEING)
def test_paths_agree_and_a_failure_loses_nothing(name: str, seed: int, places: tuple[dict[str, Target], Path]) -> None:
    found = fuzz.Found()
    fuzz.attack_once(places[0][name], seed, places[1], found)
    assert (found.faults, found.refused[name]) == ({}, 0)


@cases("name", *NAMES)
def test_no_input_ends_in_more_than_a_line(name: str, places: tuple[dict[str, Target], Path]) -> None:
    target, folder = places[0][name], places[1]

    @settings(max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def attacked(chance: Random) -> None:
        fuzz.attack(target, chance, folder)

    seeds = [*range(14)]
    if name == "worlds":
        # Nothing to shrink, and Hypothesis's least draws, as seeds 14 to 19, preempt for many seconds.
        seeds += range(20, 30)
    else:
        attacked()
    found = fuzz.Found()
    for seed in seeds:
        fuzz.attack_once(target, seed, folder, found)
    assert found.faults == {}
    assert found.refused[name] < len(seeds), "the input is refused before it is changed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disasters")
    disasters.prepare(folder)
    return folder


WRITER = {writer.name: writer for writer in disasters.WRITERS}


# One of a kind: a folder that is built beside its place and renamed, one that is added to, and a file.
# `python -m dsim.research.attack --each` is every disaster of every command.


@cases("name size", ("replay", 3000), ("sweep --force", 300), ("trace convert", 3000))
def test_a_full_disk_is_told_in_a_line_and_costs_nothing_that_was_there(name: str, size: int, folder: Path) -> None:
    assert disasters.full_disk(WRITER[name], folder, size) == "told"


def test_a_killed_command_is_ended_by_the_next_one(folder: Path) -> None:
    disasters.killed(WRITER["sweep --force"], folder, 0.5)


def test_a_folder_without_the_right_to_write_is_told_in_a_line(folder: Path) -> None:
    disasters.unwritable(WRITER["import"], folder, disasters.without_rights)


def test_a_signal_ends_a_sweep_with_what_is_done(folder: Path) -> None:
    disasters.killed(WRITER["sweep"], folder, 0.5, signal.SIGTERM, first=True)


def test_two_writers_of_one_folder_do_not_mix(folder: Path) -> None:
    disasters.two_at_once(WRITER["sweep"], folder)


def test_a_full_standard_output_is_told_in_a_line(folder: Path) -> None:
    disasters.closed_output(("trace", "info", "trace.jsonl"), folder)
