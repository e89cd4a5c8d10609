"""Experiments: what a file may say, what a value is worth, what is kept, and what a reader may fill in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsim.profiler.models import model
from dsim.research.reproduce.experiment import AT_LEAST, CALIBRATED, PREDICTED, UNPUBLISHED, read, shipped
from dsim.research.reproduce.peak_memory import GIB, RUNS, Sizes, peak
from dsim.research.reproduce.points import reproduce, summary, to_csv

from ..checks import cases, refused
from .experiments import part, rows

pytestmark = pytest.mark.slow
SMALL = """
title = "Two policies"
system = "a system"
citation = "a paper, Fig. 1"
conditions = "none"
axis = "concurrency"
measures = ["output_throughput"]
[base]
lengths = "fixed:64,32"
num_requests = 4
[over]
concurrency = [1, 2]
[[series]]
name = "A"
policy = "ar"
published.output_throughput = { 1 = 20.0 }
[[series]]
name = "B"
policy = "chunk:8"
published.output_throughput = { 1 = 50.0, 2 = 90.0 }
published."output_throughput / A" = { 2 = 2.0 }
calibrated = ["output_throughput"]
why = "a constant was moved"
"""


@pytest.fixture
def small() -> Path:
    Path("small.toml").write_text(SMALL)
    return Path("small.toml")


def test_every_shipped_experiment_reads_and_names_its_source() -> None:
    held = {name: read(name) for name in shipped()}
    assert len(held) >= 22
    for e in held.values():
        assert e.citation
        assert e.conditions
        for series in e.series:
            assert set(series.calibrated) <= set(series.published)
            assert not series.calibrated or series.why


def test_what_is_moved_to_a_published_value_is_never_called_predicted(small: Path) -> None:
    found = rows(read(str(small)))
    assert {place: row.status for place, row in found.items()} == {
        ("A", "1", "output_throughput"): PREDICTED,
        ("A", "2", "output_throughput"): UNPUBLISHED,
        ("B", "1", "output_throughput"): CALIBRATED,
        ("B", "1", "output_throughput / A"): UNPUBLISHED,
        ("B", "2", "output_throughput"): CALIBRATED,
        ("B", "2", "output_throughput / A"): PREDICTED,
    }
    one, two = found["B", "2", "output_throughput"], found["A", "2", "output_throughput"]
    assert found["B", "2", "output_throughput / A"].predicted == pytest.approx(one.predicted / two.predicted)
    assert one.error == pytest.approx(one.predicted / 90.0 - 1.0)
    assert {row.half for row in found.values()} == {None}  # of a single run


@cases("share", 0.5, 2.0)
def test_a_published_lower_bound_is_missed_only_from_below(small: Path, share: float) -> None:
    bound = share * rows(read(str(small)))["A", "1", "output_throughput"].predicted
    small.write_text(SMALL.replace("{ 1 = 20.0 }", f'{{ 1 = {bound} }}\nat_least = ["output_throughput"]'))
    row = rows(read(str(small)))["A", "1", "output_throughput"]
    assert row.status == AT_LEAST
    assert row.error == (None if share < 1 else pytest.approx(-0.5))


def test_seeds_give_an_interval_and_a_summary_counts_each_kind(small: Path) -> None:
    found = reproduce([read(str(small))], jobs=1, seeds=2)
    assert all(row.half is not None for row in found.rows)
    assert found.commit
    command = [sys.executable, "-m", "dsim.research.reproduce", "small.toml", "--jobs", "1", "--seeds", "2", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["summary"]
    assert {status: s["num"] for status, s in told.items()} == {PREDICTED: 2, UNPUBLISHED: 2, CALIBRATED: 2}
    assert found.to_json()["summary"] == told


@cases(
    "old new said",
    ("axis = \"concurrency\"", "axis = \"rate\"", "axis is rate and over has concurrency"),
    ("{ 1 = 20.0 }", "{ 3 = 20.0 }", "there is no place 3 on the axis; there are 1, 2"),
    ("{ 1 = 20.0 }", "{ 1 = \"20\" }", 'published.output_throughput.1 is "20", expected a number'),
    ("[\"output_throughput\"]\n[base]", "[\"throughput\"]\n[base]", "there is no measure throughput"),
    ("/ A", "/ C", "is over a series that is not there; there are A, B"),
    ("why = \"a constant was moved\"", "", "why is missing, expected what was moved"),
    ("[\"output_throughput\"]\nwhy", "[]\nat_least = [\"tpf\"]\nwhy", "at_least is \"tpf\", expected measures"),
    ("name = \"B\"", "name = \"A\"", "name is A a second time"),
    ("policy = \"ar\"", "policy = \"ar\"\nmemory = \"paged\"", "memory is \"paged\", expected one of vanilla"),
    ("policy = \"ar\"", "policy = \"ar\"\nmachine.gpu = \"H100\"", "machine has one of gpu and model"),
    ("policy = \"ar\"", "policy = \"ar\"\nmachine.latency.lunch = 1", "machine.latency.lunch is unknown"),
    ("conditions = \"none\"", "conditons = \"none\"", "conditons is unknown (did you mean conditions?)"),
    ("num_requests = 4", "num_request = 4", "there is no field num_request"),
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(small: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    small.write_text(SMALL.replace(old, new, 1))
    with refused() as refusal:
        read(str(small))
    assert said in str(refusal.value).replace("'", "")


def test_a_run_that_cannot_be_is_told_in_its_place(small: Path) -> None:
    small.write_text(SMALL.replace('policy = "ar"', 'policy = "lmdeploy-bd32,threshold=0.5"'))
    outcome = reproduce([read(str(small))], jobs=1)
    failed = [row for row in outcome.rows if row.series == "A"]
    assert [row.predicted for row in failed] == [None, None]
    assert all("asks for 0.5" in row.note for row in failed)
    assert summary(outcome.rows)[PREDICTED]["failed"] == 2  # A's own, and B's over A


def test_memory_follows_what_each_code_keeps() -> None:
    llada = model("LLaDA-8B")
    sizes = Sizes(llada, 607, 256, 32)
    logits = 863 * llada.vocab * 2
    assert peak("vanilla", sizes) == llada.weight_bytes + 3 * logits
    assert peak("sparse-dllm", sizes) - peak("vanilla", sizes) == 415 * 524288  # half of the 831 other tokens
    assert peak("fast-dllm", sizes) == llada.weight_bytes + 9 * logits + 863 * 524288
    assert set(RUNS) > {"vanilla", "sparse-dllm", "fast-dllm", "dllm-cache"}


def test_a_peak_that_does_not_fit_names_the_tensor_that_is_too_many() -> None:
    # A prompt of 64,000 tokens under dLLM-Cache in MaskKV's harness: 33.6 GB of keys, and as many of cached outputs.
    found = rows(part("maskkv-memory", ["dLLM-Cache", "+ MaskKV, offline budgets"], ("32000", "64000")))
    assert found["dLLM-Cache", "32000", "peak_memory"].shortage is None
    assert found["+ MaskKV, offline budgets", "64000", "peak_memory"].shortage is None
    row = found["dLLM-Cache", "64000", "peak_memory"]
    assert row.predicted * GIB == pytest.approx(85899345920 + 46.6e9, rel=1e-3)
    assert row.shortage == (
        "out of memory by 46.6 GB of 85.9 GB: keys and values take 33.6 GB in addition to weights 16 GB, "
        "logits 32.4 GB, cached outputs 33.6 GB, activations 16.8 GB"
    )
    told = to_csv(reproduce([part("maskkv-memory", ["dLLM-Cache"], ("64000",))], jobs=1)).splitlines()
    assert row.shortage in told[1]


def test_published_peaks_are_met() -> None:
    found = reproduce([read("maskkv-memory")], jobs=1).rows
    told = [row for row in found if row.published is not None]
    assert len(told) == 5
    assert {row.status for row in told} == {PREDICTED}
    assert all(abs(row.error or 1.0) < 0.02 for row in told)
    table = part("sparse-dllm", ["Fast-dLLM (dual)", "Sparse-dLLM"], ("MMLU", "GSM8K"))
    peaks = [row for row in rows(table).values() if row.measure == "peak_memory"]
    assert len(peaks) == 4
    assert all(abs(row.error or 1.0) < 0.01 for row in peaks)
    assert GIB == 2**30
