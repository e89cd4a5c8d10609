"""One input at a time: run it, and say what is wrong with how it ended."""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from dsim.engine.errors import DsimError

from .targets import Target

PATIENCE = 10  # s of the CPU for one input, without compiling rules: a machine that others work on is no hang
WAIT = 120  # s of the clock, for what sleeps or waits for another
GROWTH = 1_000_000_000  # bytes that one process may grow by
MOST_QUOTED = 100  # characters of a word in a message: 80 of the input, and what dsim puts around them


class HangError(BaseException):
    """An input took longer than PATIENCE, or waited. No loader may swallow it."""


@dataclass
class Found:
    """What a run of the attack found."""

    inputs: Counter[str] = field(default_factory=Counter)  # by target
    refused: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)  # by where it broke: the first input that did, and how
    times: Counter[str] = field(default_factory=Counter)  # how often it broke there

    def __str__(self) -> str:
        lines = [f"{name}: {n} inputs, {self.refused[name]} refused" for name, n in sorted(self.inputs.items())]
        return "\n".join([*lines, f"{self.inputs.total()} inputs, {len(self.faults)} faults"])

    def told(self) -> str:
        """Every fault, and how often it was met."""
        return "".join(f"\nFAULT {key} ({self.times[key]} times)\n{how}\n" for key, how in self.faults.items())


def attack(target: Target, chance: Random, folder: Path) -> bool:
    """Run one input in an empty folder; whether it was refused. Raises what no input may cause."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with _patience():
        try:
            target.attack(chance, folder)
        except DsimError as error:
            said = str(error)
            long = [word[:100] for word in said.replace(str(folder), "").split() if len(word) > MOST_QUOTED]
            assert not long, f"quotes {long[0]}..."
            assert not target.of_a_file or str(folder) in said, f"names no file: {said[:300]}"
            return True
    return False


def attack_once(target: Target, seed: int, folder: Path, found: Found) -> None:
    """Run the input of one seed, and take down how it ended."""
    found.inputs[target.name] += 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found.refused[target.name] += attack(target, Random(seed), folder)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < GROWTH, f"grew by {grown} bytes"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library of another language may panic
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tests/" not in f.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the attack"
        key = f"{target.name}: {type(error).__name__} at {where}"
        found.times[key] += 1
        if key not in found.faults:
            found.faults[key] = f"seed {seed}: {' '.join(str(error).split())[:300]}\n{_ours(error)}"


@contextlib.contextmanager
def workplace() -> Iterator[tuple[Path, Path]]:
    """A folder for what inputs start from, and one for the inputs."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        work, folder = Path(name) / "work", Path(name) / "input"
        work.mkdir()
        folder.mkdir()
        with warnings.catch_warnings():
            # What would reach a user of the library as a warning of NumPy's is a finding.
            warnings.simplefilter("error", RuntimeWarning)
            yield work, folder


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        worked = number == signal.SIGPROF
        if _compiles(frame):
            timer, time = (signal.ITIMER_PROF, PATIENCE) if worked else (signal.ITIMER_REAL, WAIT)
            signal.setitimer(timer, time, 0.5)
            return
        raise HangError(f"took more than {PATIENCE} s of the CPU" if worked else f"waited for more than {WAIT} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    # Again and again: what comes while a library of C calls back is lost.
    signal.setitimer(signal.ITIMER_PROF, PATIENCE, 0.5)
    signal.setitimer(signal.ITIMER_REAL, WAIT, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _compiles(frame: FrameType | None) -> bool:
    """Whether rules are compiled, once for all that come after."""
    while frame is not None and f"{os.sep}numba{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _ours(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-4:]) + f"(Python {sys.version.split()[0]})"
