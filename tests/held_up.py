"""Commands stopped in the middle, at a known place: so many replays are let through, and the others wait for a file.

No test sleeps and hopes: what is finished when a signal is sent is known, however busy the machine is.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 600  # s, for what must come: only a test that would never end meets it

# Functions of a program given as text travel to workers by value, and so take the gate with them.
GATE = """
import os, sys, time

folder, num_passes = {folder!r}, {num_passes}

def take_a_pass():
    for i in range(num_passes):
        try:
            os.close(os.open(f"{{folder}}/pass-{{i}}", os.O_CREAT | os.O_EXCL))
            return
        except FileExistsError:
            pass
    parent = os.getppid()
    while not os.path.exists(f"{{folder}}/go"):
        if os.getppid() != parent:
            os._exit(1)  # the one that it worked for was killed
        time.sleep(0.01)

import dsim.cli.bar, dsim.planner.sweep, dsim.planner.tune
from dsim.cli import main

dsim.cli.bar.EVERY = 3600.0  # s: no line of progress, however long this takes
"""
SWEEP = """
module = sys.modules["dsim.planner.sweep"]
plain = module._run

def held_up(world):
    take_a_pass()
    return plain(world)

module._run = held_up
main()
"""
TUNE = """
module = sys.modules["dsim.planner.tune"]
Plain = module.Evaluator

class HeldUp(Plain):
    def __call__(self, cell):
        take_a_pass()
        return Plain.__call__(self, cell)

module.Evaluator = HeldUp
main()
"""


def start(program: str, *arguments: object, folder: Path, num_passes: int) -> "subprocess.Popen[str]":
    """`dsim` in a session of its own, as in a shell: a signal to its group reaches its workers too."""
    folder.mkdir()
    text = GATE.format(folder=str(folder), num_passes=num_passes) + program
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_until(true: Callable[[], bool], running: "subprocess.Popen[str]") -> None:
    """Wait for what a running command will do."""
    until = time.monotonic() + PATIENCE
    while not true():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
