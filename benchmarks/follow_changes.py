"""How soon `dsim follow` names a change, how often it is wrong, and whether it finds the changed parameters again.

A world's engine serves Poisson traffic in simulated time, and its page of metrics (following/replayed.py) is read
every 5 s: months pass in minutes.

    python -m dsim.benchmarks.follow_changes                 # the changes, each at minute 90
    python -m dsim.benchmarks.follow_changes --days 30 --out DIR    # a month without any; DIR: to go on from
    python -m dsim.benchmarks.follow_changes --bound         # how much a window of vLLM's page tells of the price
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dsim.cli.objects import profile_name
from dsim.following.follower import Followed, Follower
from dsim.following.lines import Lines
from dsim.following.predicted import Observed, predict
from dsim.following.refit import MAX_EVIDENCE, Factors, middle, scaled
from dsim.following.replayed import Recorder, samples_of
from dsim.following.sources.sample import Sample
from dsim.following.windows import SECONDS, Scrape, Window
from dsim.results.engine_metrics import EDGES
from dsim.results.world import World
from dsim.traces import Trace

INTERVAL, CHANGE, HOURS = 5.0, 90.0, 3.5  # s; minutes; hours of a run
RUN_IN = 300.0  # s before the first reading
LENGTHS = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))
ENDS = {"input_length": LENGTHS, "output_length": LENGTHS}
ENDS |= {name: EDGES["vllm"][name] for name in ("ttft", "e2el", "queue")}
# Counters of each engine's page.
PAGES = {
    "vllm": ("requests", "prompt_tokens", "generation_tokens", "steps"),
    "sglang": ("requests", "prompt_tokens", "generation_tokens", "forward_seconds", "forwards"),
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """World, engine's page and traffic."""

    name: str
    world: World
    page: str
    rate: float  # req/s
    flag: str  # with a changed flag


SERVERS = {
    "vllm": Server(
        "DiffusionGemma, vLLM's page",
        World(trace="", policy="vllm-diffusion", profile="h200x2-diffusiongemma/vllm"),
        "vllm",
        1.0,
        "vllm-diffusion,max_num_seqs=1",
    ),
    "sglang": Server(
        "SDAR-8B, SGLang's page",
        World(trace="", policy="sglang-fdfo", profile="h100-sdar-8b/sglang"),
        "sglang",
        1.0,
        "sglang-fdfo,max_running_requests=2",
    ),
}
NOTHING = Factors()


@dataclass(frozen=True)
class Change:
    """At a known minute, with the right alarm; "": none is right."""

    name: str
    cause: str
    factors: Factors = NOTHING
    rate: float = 1.0
    flag: bool = False
    flag_after: float = 0.0  # minutes after the other changes
    tight: bool = False  # the flag is in force from the start, so that requests wait
    replicas: int = 1
    engines: tuple[str, ...] = ("vllm", "sglang")


CHANGES = (
    Change("steps take 10 % longer", "prices", Factors(price=1.1)),
    Change("steps take 30 % longer", "prices", Factors(price=1.3)),
    Change("15 % more steps a token", "yield", Factors(steps=1.15), engines=("vllm",)),
    Change("40 % more traffic", "traffic", rate=1.4),
    Change("fewer rows at once, by a flag", "rule", flag=True),
    Change("a replica more", "", replicas=2),
    Change("steps take 22 % longer", "prices", Factors(price=1.22)),
    Change(
        "steps take 22 % longer, and 30 minutes later fewer rows at once, by a flag", "prices, rule",
        Factors(price=1.22), flag=True, flag_after=30.0,
    ),
    Change("steps take 22 % longer where few rows at once are the rule", "prices", Factors(price=1.22), tight=True),
)  # fmt: skip


def traffic(rate: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals, log-normal lengths."""
    rng = np.random.default_rng(seed)
    time_ = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.2) + 100))
    time_ = time_[time_ < seconds]
    n = len(time_)
    prompts, answers = (rng.lognormal(np.log(mean), 0.6, n).clip(1, 8000).astype(np.int64) for mean in (500, 200))
    return Trace("traffic", time_ - time_[0], prompts, answers)


def pages(server: Server, world: World, rate: float, begin: float, seconds: float, seed: int) -> list[Sample]:
    """A stretch, counters from 0. begin: s since 1970."""
    trace = traffic(rate, RUN_IN + seconds, seed)
    setting = world.setting()
    recorder = Recorder(setting)
    result = replace(world, seed=seed).simulate_whole(trace, recorder.append)
    at = RUN_IN + np.arange(0.0, seconds, INTERVAL)
    steps = recorder.steps()
    found = samples_of(result, trace, steps, at, ENDS)
    return [
        replace(
            s,
            time=begin + s.time - RUN_IN,
            engine=server.page,
            num_engines=world.replicas,
            counters={n: s.counters[n] for n in PAGES[server.page]},
        )
        for s in found
    ]


def joined(parts: Iterable[list[Sample]], read: Sample | None = None) -> Iterator[Sample]:
    """Stretches as one server's counters. read: the last sample read before; counters continue from it."""
    offset: Sample | None = None
    for part in parts:
        first = part[0]
        if read is not None and read.time >= first.time:  # within this part
            at = next(i for i, sample in enumerate(part) if sample.time >= read.time)
            first, part, offset, read = part[at], part[at + 1 :], read, None
        elif read is not None:
            offset, read = read, None
        last = offset
        for sample in part:
            counters = {n: v - first.counters[n] for n, v in sample.counters.items()}
            histograms = {n: b.minus(first.histograms[n]) for n, b in sample.histograms.items()}
            if offset is not None:
                counters = {n: v + offset.counters[n] for n, v in counters.items()}
                histograms = {n: b.plus(offset.histograms[n]) for n, b in histograms.items()}
            last = replace(sample, counters=counters, histograms=histograms)
            yield last
        offset = last


def followed_by(server: Server, folder: Path) -> Follower:
    """Continues from its folder."""
    return Follower(
        Followed(server.world, ("twin",), INTERVAL), folder, lambda line: print(line, file=sys.stderr, flush=True)
    )


def follow(follower: Follower, samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Returns the windows' records."""
    found = [follower.add(Scrape(s.time, (s,))) for s in samples]
    return [record for record in found if record is not None]


def changed(server: Server, change: Change, seed: int = 7) -> dict[str, Any]:
    """A change at minute CHANGE: when alarms came, which parameters were found."""
    if change.tight:
        server = replace(server, world=replace(server.world, policy=server.flag))
    setting = server.world.setting()
    after = replace(server.world, replicas=change.replicas)
    if change.factors != NOTHING:
        profile = scaled(setting, change.factors)
        after = replace(after, profile=profile_name(replace(profile, name="changed")))
    zero, seconds = 1.8e9, CHANGE * 60
    stages = [(0.0, server.world, 1.0), (seconds, after, change.rate)]
    if change.flag:
        stages[1 if not change.flag_after else 2 :] = [
            (seconds + 60 * change.flag_after, replace(after, policy=server.flag), change.rate)
        ]
    ends = [*(begin for begin, *_ in stages[1:]), HOURS * 3600]
    parts = [
        pages(server, world, server.rate * rate, zero + begin, end - begin, seed + index)
        for index, ((begin, world, rate), end) in enumerate(zip(stages, ends, strict=True))
    ]
    # Syncing a disk would take most of the time.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        follower = followed_by(server, Path(folder))
        records = follow(follower, joined(parts))
    alarms = [
        {**alarm, "minutes": (record["end"] - zero) / 60 - CHANGE} for record in records for alarm in record["raised"]
    ]
    product = {"price": 1.0, "steps": 1.0}
    adopted = [record["adopted"] | {"time": record["end"]} for record in records if "adopted" in record]
    for version in adopted:
        if version["begin"] > zero + seconds - 1:
            for name in product:
                product[name] *= version["factors"][name]
    return {
        "server": server.name, "change": change.name, "cause": change.cause, "alarms": alarms, "found": product,
        "wanted": {"price": change.factors.price, "steps": change.factors.steps},
        "versions": adopted,
        "replicas": [
            ((now["end"] - zero) / 60 - CHANGE, now["replicas"])
            for then, now in pairwise(records) if now["replicas"] != then["replicas"]
        ],
        "adopted": [(version["time"] - zero) / 60 - CHANGE for version in adopted],
    }  # fmt: skip


def unchanged(server: Server, days: float, folder: Path, seed: int = 100) -> dict[str, Any]:
    """Alarms of days without a change.

    An interrupted call continues from the folder.
    """
    zero, began = 1.8e9, time.time()
    follower = followed_by(server, folder)
    for day in range(int(np.ceil(days))):
        begin, length = zero + day * 86400, min(1.0, days - day) * 86400
        read = None if follower.last is None else follower.last.samples[0]
        if read is not None and read.time > begin + length - 1.5 * INTERVAL:
            continue
        own = pages(server, server.world, server.rate, begin, length, seed + day)
        follow(follower, joined([own], read))
        print(f"{server.name}: day {day + 1} is over", file=sys.stderr, flush=True)
    records = list(Lines(folder / "windows.jsonl", 1 << 30))
    alarms = [{**a, "day": (r["end"] - zero) / 86400} for r in records for a in r["raised"]]
    return {
        "server": server.name, "days": (records[-1]["end"] - zero) / 86400, "windows": len(records), "alarms": alarms,
        "versions": follower.version, "seconds": time.time() - began,
    }  # fmt: skip


def bound(server: Server, days: float = 0.5) -> dict[str, Any]:
    """The standard error of a window's price, and the least of any linear estimator on the page.

    That is the Cramer-Rao bound for normal figures whose means move with the price, at constant covariance.
    """
    setting = server.world.setting()
    told, logs, residuals = [], [], []
    for seed, log in enumerate(np.linspace(-0.1, 0.1, 9)):
        profile = replace(scaled(setting, Factors(price=float(np.exp(log)))), name="changed")
        own = replace(server.world, profile=profile_name(profile))
        samples = pages(server, own, server.rate, 1.8e9, days * 86400, seed)
        length = round(SECONDS / INTERVAL)
        windows = [Window(tuple(samples[i : i + length + 1])) for i in range(0, len(samples) - length, length)]
        told += [told_by(window) for window in windows]
        logs += [log] * len(windows)
        if not log:
            observed = [Observed(window, last.run_in) for last, window in pairwise(windows)]
            residuals = [predict(server.world, setting, pair).residuals["step_time"][0] for pair in observed]
    figures = np.array(told)
    figures = figures[:, figures.std(axis=0) > 0]
    line = np.column_stack([np.ones(len(logs)), logs])
    moves = np.linalg.lstsq(line, figures, rcond=None)[0]
    covariance = np.cov((figures - line @ moves).T)
    information = moves[1] @ np.linalg.pinv(covariance, rcond=1e-9) @ moves[1]
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(len(residuals))[:MAX_EVIDENCE] for _ in range(2000)]
    fitted = [middle([residuals[i] for i in of])[0] for of in chosen]
    return {
        "server": server.name, "windows": len(logs), "figures": figures.shape[1], "bound": float(information**-0.5),
        "predicted": len(residuals), "follow": float(np.std(residuals, ddof=1)),
        "refit": float(np.std(fitted, ddof=1)),
    }  # fmt: skip


def told_by(window: Window) -> list[float]:
    """A window of vLLM's page: sums, their moments by interval, gauges, shares of buckets."""
    running = window.gauge("running")
    found = [running.mean(), (running**2).mean(), (running == 0).mean(), running[-1] - running[0]]
    histograms = {name: [s.histograms[name].total for s in window.samples] for name in ("e2el", "queue", "ttft")}
    counters = ("requests", "steps", "prompt_tokens", "generation_tokens")
    each = {n: np.diff([s.counters[n] for s in window.samples]) for n in counters}
    each |= {name: np.diff(totals) for name, totals in histograms.items()}
    each["e2el"] = each["e2el"] - each["queue"]
    for values in each.values():
        found += [np.log(values.sum() + 1e-2), np.log((values**2).mean() + 1e-9)]
    busy = (each["steps"] > 0) & (each["e2el"] > 0)
    ratio = each["e2el"][busy] / each["steps"][busy]
    found += [np.log((each["e2el"] * each["steps"]).mean()), ratio.mean(), *np.quantile(ratio, (0.1, 0.5))]
    for name in ("e2el", "ttft"):
        histogram = window.histogram(name)
        assert histogram is not None
        found += histogram.shares[:10].tolist()
    return [float(x) for x in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=0.0)
    parser.add_argument("--server", choices=SERVERS, action="append")
    parser.add_argument("--change", type=int, action="append")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bound", action="store_true")
    asked = parser.parse_args()
    if asked.bound:
        print(json.dumps(bound(SERVERS["vllm"])))
        return
    for name in asked.server or SERVERS:
        server = SERVERS[name]
        if asked.days:
            with tempfile.TemporaryDirectory() as made:
                folder = (asked.out or Path(made)) / name
                folder.mkdir(parents=True, exist_ok=True)
                print(json.dumps(unchanged(server, asked.days, folder)), flush=True)
            continue
        for i, change in enumerate(CHANGES):
            if name in change.engines and (not asked.change or i in asked.change):
                print(json.dumps(changed(server, change)), flush=True)


if __name__ == "__main__":
    main()
