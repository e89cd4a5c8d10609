"""Every command on every page of the documents runs, on less traffic; what cannot says why in the page's source."""

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.engine.latency import LatencyModel
from dsim.profiler.profile import load
from dsim.traces import load as load_trace
from dsim.traces import write

from ..checks import cases
from ..held_up import PATIENCE
from ..logged import poisson, write_client, write_log
from . import pages, said
from .command import Ran, dsim, rows, succeed

ROOT = pages.ROOT
# How a command may end: 1 is a verdict against it, on a machine that is not the page's; Ctrl-C ends a server.
ENDS = {"compare": (0, 1), "profile": (0, 1), "serve": (0, 130), "validate": (0, 1)}
# The second not word for word: shrunk, its searches still take a minute each.
HELD_ELSEWHERE = {
    "docs/policy-of-your-own.md": "tests/cli/test_own_policy.py",
    "docs/policy-levels.md": "tests/cli/test_own_policy.py",
    "docs/plan.md": "tests/cli/test_plan.py",
}


def profiles_of_tiny() -> None:
    """Profiles of the shipped models that call them fast, as if they had been measured here."""
    from dsim.live.weights import config_of

    from ..live.dense import save_profile

    latency = LatencyModel(((0.0, 1e-3), (64.0, 2e-3), (128.0, 4e-3)), 1e-5)
    for name, known, preset in (
        ("tiny", "a100-sdar-8b", "tiny"), ("both_ways", "rtx4090-48gb-llada-8b", "tiny-both-ways"),
    ):  # fmt: skip
        commits = tuple(replace(model, workload="records") for model in load(known).commits[:1])
        save_profile(config_of(preset), known, f"of_{name}", latency=latency, commits=commits)


@pytest.fixture
def world(tmp_path: Path, _budgets_of_processor_time: None) -> Path:
    """A folder with what the pages' commands take for granted: the reader's own files."""
    Path("trace.jsonl").write_text(rows(6, prompt=40, output=32))
    write(load_trace("azure-conv").head(100), "few.jsonl")
    stamps = "".join(f"2026-03-01T10:00:{i:02},100,48\n" for i in range(20))
    Path("mine.csv").write_text("created_at,prompt_tokens,completion_tokens\n" + stamps)
    Path("BurstGPT_1.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    shutil.copytree(ROOT / "examples", "examples")
    sweep = Path("examples/sweep.toml")
    sweep.write_text(re.sub(r"num_requests = \d+", "num_requests = 20", sweep.read_text()))
    log = (ROOT / "examples" / "steplog.jsonl").read_text().splitlines(keepends=True)
    Path("steps.jsonl").write_text("".join(log[:2600]))  # which is fitted twice as fast, and not as well
    return tmp_path


def served(words: list[str]) -> Ran:
    """A server that is asked whether it is well, and then told to end."""
    well: list[int] = []

    def ask_and_end() -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not well:
            with contextlib.suppress(OSError):
                well.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status)
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asker = threading.Thread(target=ask_and_end)
    asker.start()
    ran = dsim(words, "--port", port)
    asker.join()
    assert well == [200], ran.err
    return ran


def first_command() -> list[str]:
    """The README's, shrunk."""
    first = next(block for block in pages.blocks("README.md") if block.language == "sh")
    return pages.shrunk(first.lines[0].rpartition(" && ")[2])


@pytest.mark.slow
@cases("page", *[page for page in pages.PAGES if page not in HELD_ELSEWHERE])
def test_every_command_of_a_page_runs(page: str, world: Path) -> None:
    found = pages.blocks(page)
    commands = [line for block in found if block.language == "sh" and block.reason is None for line in block.lines]
    for block in found:  # the files that a page shows
        if block.language == "csv":
            Path("scores.csv").write_text(block.text)
    if any("tiny" in " ".join(pages.shrunk(line)) for line in commands):
        profiles_of_tiny()
    if page == "docs/report.md":
        succeed("replay azure-conv --num-requests 20 --policy ar -o runs/azure")
    if page == "docs/steplog.md":
        shutil.copy("examples/steplog.jsonl", "steps.jsonl")
    if page == "docs/compare.md":
        shutil.copy("of_tiny.json", "mine.json")
    if page == "docs/your-server.md":
        known = replace(load("a100-sdar-8b"), latency=LatencyModel(((0.0, 0.02), (16.0, 0.02), (32.0, 0.02)), 1e-4))
        slower = replace(known, latency=known.latency.scaled(1.02))
        for name, seed, drawn in (("steps.jsonl", 0, known), ("other.jsonl", 1, slower)):
            asked = poisson(20, 4.0, seed)
            write_log(Path(name), "vllm-ar,max_num_seqs=8", drawn, asked, settings={"max_num_seqs": 8})
        write_client(Path("bench.json"), Path("steps.jsonl"), 0.005)
        asked = poisson(20, 4.0, 0)
        columns = zip(asked.arrival.tolist(), asked.input_length.tolist(), asked.output_length.tolist(), strict=True)
        lines = [{"timestamp": 1e3 * at, "input_length": n, "output_length": m} for at, n, m in columns]
        Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in commands:
        words = pages.shrunk(line)
        if {*words} <= {*first_command()}:
            continue  # it is run below
        ran = served(words) if words[0] == "serve" else dsim(words)
        assert ran.code in ENDS.get(words[0], (0,)), f"{line}\n{ran.err}"
        said.check_options(said.named(" ".join(words))[0], ran.out + ran.err)


@pytest.mark.slow
def test_the_readmes_first_command_ends_in_a_decision(world: Path) -> None:
    ran = succeed(first_command())
    decision = (
        r"\d × H200, .* meet the target for .*\n"
        r"2 req/s within ttft=4s and norm_latency=400ms: (vllm-diffusion|sglang-gemma)\S* on \d H200, 2 a replica"
    )
    assert re.match(decision, ran.out), ran.out
    assert "--model-path google/diffusiongemma-26B-A4B-it" in ran.out or "serve google/diffusiongemma-" in ran.out
    assert Path("runs/plan/report.html").is_file()
    assert Path("runs/plan/plan.toml").read_text().startswith("policy = ")


@cases("page", *pages.PAGES)
def test_a_page_shows_commands_in_fences_of_sh_and_says_why_one_is_not_run(page: str) -> None:
    text = (ROOT / page).read_text()
    assert pages.LOOSE.findall(text) == []
    found = pages.blocks(page)
    for block in found:
        if block.language == "":
            assert not re.search(r"^(\$ )?(dsim|python3?|pip) ", block.text, re.M), block.text
        if block.language == "sh" and block.reason is None:
            for line in block.lines:
                assert re.match(r"([A-Z_]+=\S+ )*(\.venv/bin/)?dsim ", line), f"{page}: {line}: expected a reason"
    assert len(re.findall(r"^<!-- not run:", text, re.M)) == sum(block.reason is not None for block in found)


def test_the_options_of_every_command_on_a_page_are_its_own() -> None:
    for page in pages.PAGES:
        for words in pages.spans(page):
            name, command = said.named(" ".join(words))
            own = said.own_options(command or said.MAIN) | {"--install-completion"}
            given = {word.partition("=")[0] for word in words if word.startswith("-")}
            assert given <= own, f"{page}: dsim {name}: {given - own}"
            assert name or given, f"{page}: dsim {' '.join(words)}"


def test_a_shrunk_command_is_the_pages_with_less_traffic() -> None:
    line = "OMP_NUM_THREADS=1 dsim replay azure-conv --policy ar --num-requests 500 -o runs/a"
    words = "replay azure-conv --policy ar --num-requests 500 -o runs/a --num-requests 20"
    assert pages.shrunk(line) == words.split()
    with pytest.raises(AssertionError):
        pages.shrunk("rm -rf runs")


@pytest.mark.slow
@cases(
    "page old new", ("python", "num_requests=50", "num_requests=20"), ("traces", "num_requests=100", "num_requests=20")
)
def test_the_python_of_a_page_runs(page: str, old: str, new: str, world: Path) -> None:
    [code] = [block.text for block in pages.blocks(f"docs/{page}.md") if block.language == "python"]
    assert old in code
    code = re.sub(r'(\.plan\(\s*)"azure-conv"', r'\1"few.jsonl"', code)  # as in pages.INSTEAD
    exec(compile(code.replace(old, new), page, "exec"), {})
