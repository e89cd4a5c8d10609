"""The traces of benchmarks/follow_vllm.sh, and `dsim follow` on its recorded pages.

    python -m dsim.benchmarks.follow_vllm traces OUT --lengths L --rates R,.. --seconds S --run NAME,RATE,S ..
    python -m dsim.benchmarks.follow_vllm follow OUT --policy SPEC --window S --changes TRAFFIC,LIMIT

`follow` reads OUT/vllm.json (profile), OUT/first.pages (first the traffic changes, then a limit of the scheduler) and
OUT/flag.pages (the engine restarted with another flag when the limit changed). It prints a line a window, follows both
ways to go on, and writes what it reads of the pages to OUT/pages.jsonl.xz.
"""

import argparse
import json
import lzma
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsim.benchmarks.vllm_diffusion.tiny_trace import BURST, lines_of
from dsim.following.follower import Followed, Follower
from dsim.following.sources.engines import sample_of
from dsim.following.windows import Scrape
from dsim.results.engine_metrics import CACHE_SETTINGS, QUANTITIES
from dsim.results.world import World
from dsim.traces import synth

ZERO = 1.8e9  # s since 1970
INTERVAL = 2.0  # s
PAUSE = 60.0  # s to restart the engine
BURST_REQUESTS = 40
LEAST = 40  # requests in a window
Pages = list[tuple[float, str]]  # s since 1970, page


def write_traces(asked: argparse.Namespace) -> None:
    """Poisson traffic for the driver."""
    steps = [int(x) for x in asked.steps.split(",")] if asked.steps else None
    runs = [(f"calibration-{i}-{rate}", float(rate), asked.seconds) for i, rate in enumerate(asked.rates.split(","))]
    runs += [("calibration-burst", BURST, BURST_REQUESTS / BURST)]
    runs += [(name, float(rate), float(seconds)) for name, rate, seconds in (run.split(",") for run in asked.run)]
    for seed, (name, rate, seconds) in enumerate(runs):
        trace = synth("poisson", rate, lengths=asked.lengths, num_requests=round(rate * seconds), seed=seed)
        lines = lines_of(trace, name, steps, 0, random.Random(seed))
        (asked.folder / f"{name}.jsonl").write_text("".join(lines))


def short(page: str) -> str:
    """The lines that `dsim follow` reads."""
    names = {CACHE_SETTINGS, *(quantity.name_in("vllm") for quantity in QUANTITIES)}
    names |= {f"{name}{end}" for name in names for end in ("_bucket", "_sum")}
    return "".join(line + "\n" for line in page.splitlines() if line.partition("{")[0] in names)


def recorded(path: Path) -> Pages:
    """From 0 s."""
    pages = [json.loads(line) for line in path.read_text().splitlines()]
    return [(page["time"] - pages[0]["time"], page["page"]) for page in pages]


def follow(pages: Iterable[tuple[float, str]], world: World, folder: Path, window: float) -> Iterator[dict[str, Any]]:
    """Returns the windows' records."""
    followed = Followed(world, ("recorded",), INTERVAL, window, requests=LEAST)
    follower = Follower(followed, folder, tell=lambda line: print(f"# {line}"))
    for when, page in pages:
        record = follower.add(Scrape(ZERO + when, (sample_of(page, ZERO + when, "recorded"),)))
        if record is not None:
            yield record


def write_recorded(path: Path, parts: dict[str, Pages]) -> None:
    """Several recordings in one file."""
    lines = [
        json.dumps({"of": name, "time": round(when, 3), "page": short(page)}) + "\n"
        for name, pages in parts.items() for when, page in pages
    ]  # fmt: skip
    path.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def ways(first: Pages, flag: Pages, limit: float) -> dict[str, Pages]:
    """The limit changes in mid-run, or as a restarted engine's flag."""
    begin = limit + PAUSE
    return {"limit": first, "flag": [p for p in first if p[0] < limit] + [(begin + when, page) for when, page in flag]}


def follow_both(asked: argparse.Namespace) -> None:
    first, flag = (recorded(asked.folder / f"{name}.pages") for name in ("first", "flag"))
    write_recorded(asked.folder / "pages.jsonl.xz", {"first": first, "flag": flag})
    world = World(trace="", policy=asked.policy, profile=str(asked.folder / "vllm.json"))
    _, limit = (float(x) for x in asked.changes.split(","))
    for name, pages in ways(first, flag, limit).items():
        print(f"# {name}: traffic changes at {asked.changes.partition(',')[0]} s, the limit at {limit:g} s")
        with tempfile.TemporaryDirectory() as folder:
            for record in follow(pages, world, Path(folder), asked.window):
                residuals = {n: round(of[0], 3) for n, of in record["residuals"].items() if of[0] is not None}
                print(json.dumps({
                    "begin": round(record["begin"] - ZERO), "end": round(record["end"] - ZERO),
                    "requests": record["requests"], "residuals": residuals,
                    "raised": [alarm["words"] for alarm in record["raised"]], "open": list(record["alarms"]),
                }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    traces = kinds.add_parser("traces")
    traces.set_defaults(run_it=write_traces)
    traces.add_argument("folder", type=Path)
    traces.add_argument("--lengths", required=True)
    traces.add_argument("--rates", required=True)
    traces.add_argument("--seconds", type=float, required=True)
    traces.add_argument("--run", action="append", required=True)
    traces.add_argument("--steps")
    both = kinds.add_parser("follow")
    both.set_defaults(run_it=follow_both)
    both.add_argument("folder", type=Path)
    both.add_argument("--policy", required=True)
    both.add_argument("--window", type=float, required=True)
    both.add_argument("--changes", required=True)
    asked = parser.parse_args()
    asked.run_it(asked)


if __name__ == "__main__":
    main()
