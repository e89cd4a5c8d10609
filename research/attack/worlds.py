"""Random worlds: every preset, its fields, its options and the shipped profiles, held to invariants and to laws.

An invariant holds in one run (`check`); a law relates two runs whose difference is known (`LAWS`).
"""

import contextlib
import dataclasses
import itertools
import math
import typing
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from dsim.engine import core
from dsim.engine.engine import Engine
from dsim.engine.errors import DsimError
from dsim.engine.journal import REQUEST_COLUMNS, RequestTable
from dsim.engine.part import Choice, Policy, Range
from dsim.engine.prefix import caches_prefixes
from dsim.engine.replay import replay
from dsim.engine.spec import PRESETS, parse
from dsim.engine.state import Asked
from dsim.profiler.profile import SHIPPED, Profile, load
from dsim.results.metrics import summarize
from dsim.sim.routers import ROUTERS
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces.prefixes import prefixes_of
from dsim.traces.trace import Trace

from ...tests.worlds import Collector, table_bytes

COMPLETED, REJECTED, UNFINISHED = 0, 1, 2
PREFILL = 0  # a row's phase
TIMES = ("arrival", "scheduled", "first_commit", "first_block", "first_emission", "last_emission", "finish")
LARGE = 64  # of a number without a bound, most draws
RUN_AGAIN = 4000  # steps of a world that is run once more: rules that are not compiled take some 0.5 ms each
LOOKED_UP = 4  # times as long, where pages are looked up in a prefix cache


@dataclass(frozen=True)
class RandomWorld:
    """A run, before it begins."""

    trace: Trace
    profile: Profile
    spec: str
    options: dict[str, Any]

    @property
    def policy(self) -> Policy:
        return parse(self.spec)

    def run(self, append: Any = None) -> RunRecords:
        return simulate(self.trace, Setting(self.policy, self.profile), append=append, **self.options)

    def __str__(self) -> str:
        rows = zip(*(column.tolist() for column in (self.trace.arrival, *self.trace.lengths)), strict=True)
        return f"{self.spec} on {self.profile.name}, {self.options}, requests {list(rows)}"


@cache
def profiles() -> tuple[Profile, ...]:
    return tuple(load(path.stem) for path in sorted(Path(SHIPPED).glob("*.json")))


def draw(chance: Random) -> RandomWorld:
    """A world by chance; a policy that may turn out not to exist."""
    profile = chance.choice(profiles())
    able = [name for name, preset in PRESETS.items() if preset.policy.family == profile.family]
    able += ["ar"] * (profile.family != "full-sequence")
    name = chance.choice(able)
    trace = _trace(chance)
    fields = _fields(PRESETS[name].policy, profile, chance)
    page = int(fields.get("page_size", PRESETS[name].policy.memory.page_size))
    if chance.random() < 0.6:  # memory is short
        longest = int((trace.input_length + trace.limit).max())
        fields["num_pages"] = str(max(1, int(longest / page * chance.uniform(0.8, 4.0))) + chance.randint(0, 3))
    options: dict[str, Any] = {
        "replicas": chance.choice((1, 1, 2, 3)), "router": chance.choice(list(ROUTERS)), "seed": chance.randrange(9),
        "emit": chance.choice(("block", "step", "end")), "eos": chance.random() < 0.3,
        "drain": chance.random() < 0.8,
    }  # fmt: skip
    if chance.random() < 0.25:
        options |= {"concurrency": chance.randint(1, 5), "drain": True}
    return RandomWorld(trace, profile, ",".join([name, *(f"{n}={v}" for n, v in fields.items())]), options)


def _trace(chance: Random) -> Trace:
    n = chance.choice((1, 2, 5, 9, 14))
    gap = chance.choice((0.0, 0.01, 0.2, 3.0))
    arrival = np.cumsum([0.0, *(gap * chance.choice((0.0, 0.25, 1.0, 4.0)) for _ in range(n - 1))])
    longest = chance.choice((8, 60, 300, 1500))
    prompts = [chance.choice((1, chance.randint(1, longest), longest)) for _ in range(n)]
    outputs = [chance.choice((0, 1, chance.randint(1, 60), 32, 64)) for _ in range(n)]
    extras: dict[str, list[Any]] = {}
    if chance.random() < 0.3:
        extras["max_tokens"] = [chance.choice((None, o + chance.randint(0, 40))) or None for o in outputs]
        extras["max_tokens"] = [None if most is None else max(most, 1) for most in extras["max_tokens"]]
    if chance.random() < 0.4:
        extras["session_id"] = [f"s{chance.randrange(3)}" for _ in range(n)]
    return Trace("world", arrival, np.array(prompts), np.array(outputs), extras)


def _fields(policy: Policy, profile: Profile, chance: Random) -> dict[str, str]:
    """Values of a few of a policy's fields, within what they declare."""
    found: dict[str, str] = {}
    share = chance.choice((0.0, 0.1, 0.3))
    for part in policy.parts():
        hints = typing.get_type_hints(type(part), include_extras=True)
        for f in dataclasses.fields(part):  # type: ignore[arg-type]
            rare = f.name in ("strategy", "temperature", "denoising_steps", "sub_block", "head")
            if f.name != "num_pages" and chance.random() < share * (0.2 if rare else 1.0):
                found[f.name] = _value(f.name, hints[f.name], getattr(part, f.name), profile, chance)
    return found


def _value(name: str, hint: Any, default: Any, profile: Profile, chance: Random) -> str:
    notes = getattr(hint, "__metadata__", ())
    for note in notes:
        if isinstance(note, Choice):
            return chance.choice(note.words)
    if isinstance(default, bool):
        return str(chance.random() < 0.5).lower()
    if isinstance(default, tuple):
        return "/".join(str(v) for v in sorted(chance.sample(range(2, 17), chance.randint(1, 3))))
    if name in ("block_length", "threshold") and profile.commits:
        return str(getattr(chance.choice(profile.commits), name))
    if default is None and chance.random() < 0.2:
        return "none"
    bounds = next((note for note in notes if isinstance(note, Range)), Range())
    low, high = bounds.low or 0, bounds.high if bounds.high is not None else LARGE
    if isinstance(default, float):
        return f"{chance.uniform(low, min(high, low + 4)):.3g}"
    most = min(high, max(LARGE, default or 0))
    return str(chance.choice((int(low), int(low) + 1, chance.randint(int(low), int(most)), default or int(most))))


# ---- invariants -------------------------------------------------------------------------------------------------


def check(world: RandomWorld) -> RunRecords:
    """Run a world, and hold it to what holds of every run (architecture.md, "Invariants")."""
    journal = Collector()
    result = world.run(journal)
    t, limits, drained = result.table, result.limits, world.options["drain"]
    policy, trace, replicas = result.policy, world.trace, world.options["replicas"]
    status = t["status"]
    engine = Engine(policy, limits, RequestTable(0), latency=world.profile.latency)
    # As they were served: an answer that ends in its prompt's block goes on behind it (`_past_eos` of the twin).
    served = [replace(trace.request(i), output_length=int(n)) for i, n in enumerate(t["output_length"])]
    fits = np.array([engine.fits(request) for request in served])
    assert ((status == REJECTED) == (~fits & (t["replica"] >= 0))).all(), "rejected are those that never fit"
    if drained:
        assert (status != UNFINISHED).all(), f"unfinished: {np.flatnonzero(status == UNFINISHED)}"
    done = status == COMPLETED
    wanted = trace.output_length
    assert (t["num_tokens"][done] >= wanted[done]).all(), "tokens are missing"
    assert (t["num_tokens"][status == REJECTED] == 0).all(), "a rejected request has tokens"
    some = done & (wanted > 0)
    for early, late in itertools.pairwise(TIMES):
        if "first_block" in (early, late):
            continue  # a first emission of steps comes before a first block
        assert (t[early][some] <= t[late][some]).all(), f"{early} after {late}"
    if not journal.parts:
        return result
    steps, lists = journal.steps, journal.lists
    assert (steps["pages"] <= limits.num_pages).all(), "more pages than the pool has"
    assert (steps["batch"] <= limits.max_batch).all(), "more rows than a batch has"
    assert (steps["latency"] >= 0).all(), "a step of negative time"
    rows, offsets = lists["requests"]
    phases = lists["phases"][0]
    of_step = np.repeat(np.arange(len(steps["step"])), np.diff(offsets))
    for r in range(replicas):
        own = steps["replica"] == r
        start, end = steps["start"][own], (steps["start"] + steps["latency"])[own]
        assert (start[1:] >= end[:-1]).all(), "time runs backwards"
        assert (steps["step"][own] == np.arange(own.sum())).all(), "a step is missing"
    assert (steps["start"][of_step] >= t["arrival"][rows]).all(), "computed before it arrives"
    # What the requests' table and the totals say is what the steps say.
    decode = ~steps["prefill"]
    active = decode[of_step] & (phases != PREFILL)
    counted = np.bincount(rows[active], minlength=len(trace))
    assert (t["num_forwards"] == counted).all(), f"num_forwards {t['num_forwards']}, in the steps {counted}"
    words = len(lists["commits"][0]) // max(1, len(rows))
    commits = np.array([int(word).bit_count() for word in lists["commits"][0]]).reshape(len(rows), words).sum(axis=1)
    total = np.bincount(rows, commits, len(trace)).astype(int)
    assert (t["num_committed"] == total).all(), f"num_committed {t['num_committed']}, in the steps {total}"
    totals = result.totals
    assert totals.num_decode_steps == decode.sum(), "decode steps"
    assert totals.num_prefill_steps == (~decode).sum(), "prefill steps"
    assert totals.preemptions == t["num_preemptions"].sum(), "preemptions"
    if drained:  # otherwise a step that is planned as the run ends may have preempted some
        assert totals.preemptions == steps["preempted"].sum(), "preemptions of steps"
    computed = int(lists["num_tokens"][0][active].sum())
    evicted = int(steps["evicted"].sum())
    summary = summarize(world.spec, {name: t[name] for name in REQUEST_COLUMNS}, totals, replicas=replicas)
    _same("token_utilization", summary.token_utilization, commits[active].sum(), computed - evicted)
    _same("tpf", summary.tpf, commits[active].sum(), active.sum())
    busy = float(steps["latency"].sum())
    first = float(t["arrival"].min())
    last = max(float((steps["start"] + steps["latency"]).max()), float(np.nanmax(np.append(t["finish"][done], 0.0))))
    _same("busy_share", summary.busy_share, busy, replicas * (last - first))
    for name, share in (("busy_share", summary.busy_share), ("kv_utilization", summary.kv_utilization)):
        assert share is None or not share > 1 + 1e-9, f"{name} is {share}"
    _replays(world, result, steps, lists)
    return result


def _same(name: str, value: float | None, amount: float, base: float) -> None:
    computed = amount / base if base > 0 else None
    same = value is computed if value is None or computed is None else math.isclose(value, computed, rel_tol=1e-9)
    assert same, f"{name} is {value}, its formula gives {computed}"


def _replays(world: RandomWorld, result: RunRecords, steps: Any, lists: Any) -> None:
    """A journal fed to a fresh engine gives the same plans; it does not hold what canvases requests ask for."""
    if not world.options["drain"] or len(steps["step"]) > RUN_AGAIN:
        return
    t = result.table
    columns = {name: t[name] for name in REQUEST_COLUMNS}
    for r in range(world.options["replicas"]):
        table = RequestTable(
            len(world.trace), t["arrival"], Asked(t["input_length"], t["output_length"], t["max_tokens"], t["estimate"])
        )
        prefixes = prefixes_of(world.trace) if result.cached_tokens is not None else None
        engine = Engine(
            result.policy, result.limits, table, replica=r, latency=world.profile.latency,
            emit=world.options["emit"], eos=world.options["eos"], prefixes=prefixes,
        )  # fmt: skip
        difference = next(replay(engine, r, columns, steps, lists), None)
        assert difference is None, difference


# ---- laws -------------------------------------------------------------------------------------------------------


def without_a_journal(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """A run without a journal is the same run."""
    assert table_bytes(world.run().table) == table_bytes(result.table), "the journal changes the run"


def beside_another(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """Another policy that runs in between changes nothing."""
    with contextlib.suppress(DsimError):
        draw(chance).run()
    assert table_bytes(world.run().table) == table_bytes(result.table), "another policy changes the run"


def time_scaled(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """Arrivals and steps that take 2^k times as long take 2^k times as long in all, to the last bit."""
    factor = 2.0 ** chance.choice((-3, -1, 1, 4))
    profile = replace(
        world.profile, latency=world.profile.latency.scaled(factor), frontend=world.profile.frontend * factor
    )
    other = replace(world, profile=profile, trace=world.trace.time_scaled(factor)).run().table
    for name in REQUEST_COLUMNS:
        scale = factor if name in TIMES else 1
        unknown = result.table[name].dtype.kind == "f"
        assert np.array_equal(other[name], result.table[name] * scale, equal_nan=unknown), f"{name} by {factor}"


def replicas_are_apart(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """What others of a round-robin fleet are asked for changes nothing for the first replica."""
    n = world.options["replicas"]
    if n == 1 or world.options["router"] != "round-robin" or "concurrency" in world.options:
        return
    if not world.options["drain"] or "session_id" in world.trace.extras:
        return
    mine = np.arange(len(world.trace)) % n == 0
    prompts = np.where(mine, world.trace.input_length, 1 + world.trace.input_length // 2)
    other = replace(world, trace=replace(world.trace, input_length=prompts)).run().table
    for name in TIMES:
        assert np.array_equal(other[name][mine], result.table[name][mine], equal_nan=True), f"{name} of replica 0"


def duplicated(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """Every request twice, on twice as many replicas in turn, is every replica twice; where nothing is drawn."""
    policy, options = result.policy, world.options
    fixed = (policy.rows.commits == "tokens" and policy.width == 1) or policy.unmasking.scheduled(policy)
    if not fixed or options["router"] != "round-robin" or "concurrency" in options or options["replicas"] != 1:
        return
    if not options["drain"] or "session_id" in world.trace.extras:
        return
    twice = world.trace.take(np.repeat(np.arange(len(world.trace)), 2))
    other = replace(world, trace=twice, options={**options, "replicas": 2}).run().table
    for name in (*TIMES, "num_tokens", "num_forwards", "num_preemptions"):
        for half in (0, 1):
            same = np.array_equal(other[name][half::2], result.table[name], equal_nan=name in TIMES)
            assert same, f"{name} of the duplicated replica {half}"


def permuted(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """Requests that arrive at once and run at once may come in any order; where nothing is drawn."""
    policy, limits, trace = result.policy, result.limits, world.trace
    plain = (
        (policy.rows.commits == "tokens") and policy.width == 1 and world.options["replicas"] == 1 and not trace.extras
    )
    if not plain or "concurrency" in world.options or trace.duration > 0 or len(trace) > limits.max_batch:
        return
    if result.totals.num_prefill_steps != 1 or result.totals.preemptions:
        return
    order = np.array(chance.sample(range(len(trace)), len(trace)))
    other = replace(world, trace=trace.take(order)).run().table
    for name in TIMES:
        assert np.array_equal(other[name], result.table[name][order], equal_nan=True), f"{name} of equal arrivals"


def twice_as_fast(world: RandomWorld, result: RunRecords, chance: Random) -> None:
    """A device twice as fast does the work of requests that are all there in half the time, and rejects none more."""
    profile = replace(world.profile, latency=world.profile.latency.scaled(0.5), frontend=world.profile.frontend * 0.5)
    other = replace(world, profile=profile).run()
    assert ((other.table["status"] == REJECTED) == (result.table["status"] == REJECTED)).all(), "others are rejected"
    if world.options["drain"]:
        slow, fast = (float(np.nanmax(np.append(t["finish"], 0.0))) for t in (result.table, other.table))
        assert fast <= slow * (1 + 1e-9), f"ends at {fast} s on a device twice as fast, and at {slow} s on this one"


LAWS: tuple[Callable[[RandomWorld, RunRecords, Random], None], ...] = (
    without_a_journal, beside_another, time_scaled, replicas_are_apart, duplicated, permuted, twice_as_fast,
)  # fmt: skip


def attack(chance: Random, folder: Path) -> None:
    """A random world, its invariants, and one of the laws."""
    with ExitStack() as patient:
        for patience in ("PATIENCE", "STEPS_PATIENCE"):  # compiling takes longer than all steps of so small a world
            patient.enter_context(mock.patch.object(core, patience, 10**9))
        world = draw(chance)
        try:
            result = check(world)
            steps = result.totals.num_prefill_steps + result.totals.num_decode_steps
            if steps * (LOOKED_UP if caches_prefixes(world.policy) else 1) <= RUN_AGAIN:
                chance.choice(LAWS)(world, result, chance)
        except AssertionError as error:
            raise AssertionError(f"{error}: {world}") from error
