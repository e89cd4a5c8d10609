"""The long attack: `python -m dsim.research.attack --minutes 60`, from the repository's root. Exit 1 for a finding."""

import argparse
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from . import disasters, fuzz
from .targets import targets, weighted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


def _killed(
    number: signal.Signals, first: bool, writer: disasters.Writer, folder: Path, share: float, _size: int
) -> str:
    return disasters.killed(writer, folder, share, number, first)


# By name, what happens to a writer in a folder: told the share of its time after which, and the bytes of the disk.
TRIES: dict[str, Callable[[disasters.Writer, Path, float, int], str]] = {
    "full disk": lambda writer, folder, share, size: disasters.full_disk(writer, folder, size),
    "no space left": lambda writer, folder, share, size: disasters.full_disk(writer, folder, size, really=True),
    **{
        f"{number.name}{', first run' if first else ''}": partial(_killed, number, first)
        for number in SIGNALS
        for first in (False, True)
    },
    "unwritable": lambda writer, folder, share, size: disasters.unwritable(writer, folder, disasters.without_rights),
    "read-only": lambda writer, folder, share, size: disasters.unwritable(writer, folder, disasters.read_only),
    "two at once": lambda writer, folder, share, size: disasters.two_at_once(writer, folder),
}
ON_A_SMALL_DISK = ("no space left", "read-only")


def main() -> int:
    """Attack until the time is over, and print what was tried and found."""
    given = argparse.ArgumentParser(prog="python -m dsim.research.attack", description=__doc__)
    given.add_argument("--minutes", type=float, default=60.0, help="how long, in all")
    given.add_argument("--seed", type=int, default=0, help="where the inputs' seeds begin")
    given.add_argument("--only", default="", help="targets whose name holds this")
    given.add_argument("--inputs", type=int, default=None, help="end after so many inputs, too")
    given.add_argument("--input", type=int, default=None, help="run the one input of this seed, which a fault names")
    given.add_argument("--disasters", type=float, default=0.25, help="share of the time for kills and full disks")
    given.add_argument("--each", action="store_true", help="no inputs: each disaster once, of the commands of --only")
    given.add_argument("--log", type=Path, default=None, help="write the counts there every minute")
    asked = given.parse_args()
    if asked.input is not None:
        return _one(asked.only, asked.input)
    begin = time.monotonic()
    until = begin + 60 * asked.minutes
    found = fuzz.Found()
    tried: Counter[str] = Counter()
    if asked.each:
        _disasters(0.0, asked.seed, found, tried, only=asked.only)
        print(_account(found, tried, begin))
        return 1 if found.faults else 0
    if asked.disasters > 0 and not asked.only:
        _disasters(begin + asked.disasters * 60 * asked.minutes, asked.seed, found, tried)
    with fuzz.workplace() as (work, folder):
        every = targets(work)
        turns = [target for target in (weighted(every) if not asked.only else every) if asked.only in target.name]
        chance = Random(asked.seed)
        seed, told = asked.seed * 1_000_000_000, time.monotonic()
        while time.monotonic() < until and found.inputs.total() != asked.inputs:
            seed += 1
            fuzz.attack_once(chance.choice(turns), seed, folder, found)
            if asked.log is not None and time.monotonic() > told + 60:
                told = time.monotonic()
                asked.log.write_text(_account(found, tried, begin))
    print(_account(found, tried, begin))
    return 1 if found.faults else 0


def _account(found: fuzz.Found, tried: Counter[str], begin: float) -> str:
    """What was tried so far, in what time and memory, and every fault."""
    lines = [str(found), *(f"{name}: {n}" for name, n in sorted(tried.items()))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines.append(f"{sum(tried.values())} disasters; {time.monotonic() - begin:.0f} s; peak memory {peak:.2f} GB")
    return "\n".join(lines) + "\n" + found.told()


def _one(name: str, seed: int) -> int:
    """Run one input again, and let it break."""
    with fuzz.workplace() as (work, folder):
        [target] = [target for target in targets(work) if target.name == name]
        print("refused" if fuzz.attack(target, Random(seed), folder) else "read")
    return 0


def _disasters(until: float, seed: int, found: fuzz.Found, tried: Counter[str], only: str | None = None) -> None:
    """Disasters by chance until the time is over; or each once, of the commands whose name holds `only`."""
    chance = Random(seed)
    with tempfile.TemporaryDirectory(prefix="disasters-") as name, ExitStack() as on:
        folder = Path(name)
        small = on.enter_context(disasters.small_disk(folder))  # we are a superuser
        disasters.prepare(folder)
        writers = [*disasters.WRITERS]
        if disasters.prepare_device(folder):
            writers += disasters.ON_A_DEVICE
        turns: list[tuple[disasters.Writer | None, str]]
        turns = [(writer, what) for writer in writers for what in TRIES if small or what not in ON_A_SMALL_DISK]
        turns += [(None, f"{number.name}, a server") for number in SIGNALS]
        if only is not None:
            turns = [(writer, what) for writer, what in turns if only in (writer.name if writer else "serve")]
        while turns if only is not None else time.monotonic() < until:
            writer, what = turns.pop(0) if only is not None else chance.choice(turns)
            share, size = chance.uniform(0.0, 1.0), int(10 ** chance.uniform(3, 6.8))  # what is said is a file, too
            key = f"{writer.name if writer else 'serve'}: {what}"
            try:
                if writer is None:
                    ended = disasters.serving(folder, signal.Signals[what.partition(",")[0]])
                else:
                    ended = TRIES[what](writer, folder, share, size)
                tried[f"{key}, {ended}"] += 1
            except AssertionError as error:
                found.faults.setdefault(key, f"size {size}, after {share:.2f} of its time: {str(error)[-1500:]}")
                found.times[key] += 1
                tried[f"{key}, FAULT"] += 1
            if only is not None:
                print(list(tried)[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main())
