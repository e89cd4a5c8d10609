"""The long attack: `python -m tests.attack --minutes 60`, from the repository's root. Exit 1 for a finding."""

import argparse
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

from . import disasters, fuzz
from .targets import targets, weighted


def main() -> int:
    """Attack until the time is over, and print what was tried and found."""
    given = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    given.add_argument("--minutes", type=float, default=60.0, help="how long, in all")
    given.add_argument("--seed", type=int, default=0, help="where the inputs' seeds begin")
    given.add_argument("--only", default="", help="targets whose name holds this")
    given.add_argument("--inputs", type=int, default=None, help="end after so many inputs, too")
    given.add_argument("--input", type=int, default=None, help="run the one input of this seed, which a fault names")
    given.add_argument("--disasters", type=float, default=0.25, help="share of the time for kills and full disks")
    given.add_argument("--log", type=Path, default=None, help="write the counts there every minute")
    asked = given.parse_args()
    if asked.input is not None:
        return _one(asked.only, asked.input)
    begin = time.monotonic()
    until = begin + 60 * asked.minutes
    found = fuzz.Found()
    tried: Counter[str] = Counter()
    if asked.disasters > 0 and not asked.only:
        _disasters(begin + asked.disasters * 60 * asked.minutes, asked.seed, found, tried)
    with fuzz.workplace() as (work, folder):
        turns = [target for target in weighted(targets(work)) if asked.only in target.name]
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


def _disasters(until: float, seed: int, found: fuzz.Found, tried: Counter[str]) -> None:
    chance = Random(seed)
    with tempfile.TemporaryDirectory(prefix="disasters-") as name, ExitStack() as on:
        folder = Path(name)
        small = on.enter_context(disasters.small_disk(folder))  # we are a superuser
        disasters.prepare(folder)
        writers = [*disasters.WRITERS]
        if disasters.prepare_device(folder):
            writers += disasters.ON_A_DEVICE
        while time.monotonic() < until:
            writer = chance.choice(writers)
            after = chance.uniform(0.0, 1.5)
            number = chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
            size = int(10 ** chance.uniform(3, 6.8))  # what is said is a file, too
            tries: dict[str, Callable[[], str]] = {
                "full disk": lambda: disasters.full_disk(writer, folder, size),  # noqa: B023 - called in its round
                number.name: lambda: disasters.killed(writer, folder, after, number),  # noqa: B023
                "SIGKILL, first run": lambda: disasters.stopped_early(writer, folder, after),  # noqa: B023
                "unwritable": lambda: disasters.unwritable(writer, folder, disasters.without_rights),  # noqa: B023
                "two at once": lambda: disasters.two_at_once(writer, folder),  # noqa: B023
                f"{number.name}, a server": lambda: disasters.serving(folder, number),  # noqa: B023
            }
            if small:
                tries["no space left"] = lambda: disasters.full_disk(writer, folder, size, really=True)  # noqa: B023
                tries["read-only"] = lambda: disasters.unwritable(writer, folder, disasters.read_only)  # noqa: B023
            what = chance.choice(list(tries))
            who = "serve" if what.endswith("a server") else writer.name
            try:
                tried[f"{who}: {what}, {tries[what]()}"] += 1
            except AssertionError as error:
                key = f"{who}: {what}"
                found.faults.setdefault(key, f"size {size}, after {after:.2f} s: {str(error)[:1500]}")
                found.times[key] += 1
                tried[f"{key}, FAULT"] += 1


if __name__ == "__main__":
    sys.exit(main())
