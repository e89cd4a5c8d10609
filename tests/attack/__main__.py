"""The long attack: `python -m tests.attack --minutes 60`, from the repository's root. Exit 1 for a finding."""

import argparse
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
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
    if not asked.only:
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
                asked.log.write_text(f"{told - begin:.0f} s\n{found}\n{found.told()}")
    print(found)
    for name, n in sorted(tried.items()):
        print(f"{name}: {n}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{sum(tried.values())} disasters; {time.monotonic() - begin:.0f} s; peak memory {peak:.2f} GB")
    print(found.told())
    return 1 if found.faults else 0


def _one(name: str, seed: int) -> int:
    """Run one input again, and let it break."""
    with fuzz.workplace() as (work, folder):
        [target] = [target for target in targets(work) if target.name == name]
        print("refused" if fuzz.attack(target, Random(seed), folder) else "read")
    return 0


def _disasters(until: float, seed: int, found: fuzz.Found, tried: Counter[str]) -> None:
    chance = Random(seed)
    with tempfile.TemporaryDirectory(prefix="disasters-") as name:
        folder = Path(name)
        disasters.prepare(folder)
        while time.monotonic() < until:
            writer = chance.choice(disasters.WRITERS)
            after = chance.uniform(0.0, 1.5)
            number = chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            size = int(10 ** chance.uniform(3, 6.8))  # what is said is a file, too
            what, how = chance.choice(
                [
                    ("full disk", lambda w=writer, s=size: disasters.full_disk(w, folder, s)),
                    ("kill -9", lambda w=writer, a=after: disasters.killed(w, folder, a)),
                    ("kill -9, first run", lambda w=writer, a=after: disasters.stopped_early(w, folder, a)),
                    (number.name, lambda w=writer, a=after, n=number: disasters.killed(w, folder, a, n)),
                    ("two at once", lambda w=writer: disasters.two_at_once(w, folder)),
                ]
            )  # fmt: skip
            try:
                tried[f"{what}, {how()}"] += 1
            except AssertionError as error:
                key = f"{writer.name}: {what}"
                found.faults.setdefault(key, f"size {size}, after {after:.2f} s: {str(error)[:1500]}")
                tried[f"{what}, FAULT"] += 1


if __name__ == "__main__":
    sys.exit(main())
