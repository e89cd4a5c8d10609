"""Searches killed with -9 at random moments: run again, each gives the bytes of one that was never stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from ..checks import cases
from ..cli.command import rows
from ..held_up import PATIENCE

KILLS = 10
PROGRAM = "from dsim.cli import main\nfrom dsim.planner import tune\ntune.REPLICATIONS = 2\nmain()\n"
SWEEP = '[base]\ntrace = "azure-conv"\nnum_requests = 40\n[grid]\npolicy = ["ar", "chunk"]\nrate = [1, 2, 3, 4]\n'
COMMANDS = {
    "plan": "trace.jsonl --policy chunk --policy ar --slo ttft=2s --rate 8 --num-requests 120 --jobs 2",
    "tune": "trace.jsonl --policy chunk --space space.toml --slo norm_latency=20ms --trials 6 --jobs 2",
    "sweep": "sweep.toml --jobs 2",
    "capacity": "trace.jsonl --policy chunk --slo ttft=2s --num-requests 120 --precision 0.2 --jobs 1",
}


def run(command: str, out: str, seconds: float = PATIENCE) -> dict[str, bytes]:
    """The files of the command's folder, without the store; killed with its workers after `seconds`."""
    words = [sys.executable, "-c", PROGRAM, command, *COMMANDS[command].split(), "-o", out]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, err = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=PATIENCE)
        return {}
    assert running.returncode == 0, err.decode()
    return {path.name: path.read_bytes() for path in Path(out).iterdir() if path.suffix != ".db"}


@pytest.mark.slow
@cases("command", *COMMANDS)
def test_a_search_killed_at_any_moment_and_run_again_gives_the_same_bytes(command: str) -> None:
    Path("trace.jsonl").write_text(rows(120))
    Path("space.toml").write_text('policy = "chunk"\nchunk = [4, 8, 16]\nmax_batch = ["none", 32]\n')
    Path("sweep.toml").write_text(SWEEP)
    run(command, "warm")  # compiles policies
    began = time.monotonic()
    whole = run(command, "whole")
    duration = time.monotonic() - began
    chance, num_resumed = Random(command), 0
    for i in range(KILLS):
        run(command, f"killed-{i}", chance.random() * duration)
        num_resumed += Path(f"killed-{i}", "replays.db").is_file()
        assert run(command, f"killed-{i}") == whole
    assert num_resumed > 0
    assert not list(Path().glob(".*"))
