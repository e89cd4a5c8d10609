"""A world: all inputs of one run. Its files are read and its policies parsed once, when first needed."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..engine.allowed_code import NO_CODE, AllowedCode, allowed
from ..engine.commits import CanvasLaw, CommitModel
from ..engine.errors import DsimError, PolicyError
from ..engine.prefix import caches_prefixes
from ..engine.spec import Policy, named_files, parse, with_files
from ..files.read import FilePath, cut, quoted, read_toml
from ..profiler.placed import placed, yield_files
from ..profiler.profile import DEFAULT, Profile, as_run_by, located, with_file_of
from ..profiler.profile import load as load_profile
from ..sim.deciders import least_uncached
from ..sim.link import Link
from ..sim.memory import check_fits, longest
from ..sim.pools import MAX_REPLICAS as MAX_REPLICAS
from ..sim.pools import Fleet, Pool, PoolSpec
from ..sim.routers import Routing, routing
from ..sim.scalers import FIXED, scaling
from ..sim.setting import Setting
from ..sim.twin import Append, Progress, RunRecords, simulate
from ..traces import Trace, load, prepare
from ..traces.estimates import with_estimates
from ..traces.lengths import LENGTHS, without_limit
from .fleet_file import FleetWords
from .metrics import Columns, Summary, rows_of, summarize
from .slo import Slo

S = TypeVar("S")
T = TypeVar("T")


def once(method: Callable[[S], T]) -> Callable[[S], T]:
    """A method without arguments, computed when an object is first asked."""
    name = f"_{method.__name__}_once"

    @wraps(method)
    def called(self: S) -> T:
        values = vars(self)
        if name not in values:
            values[name] = method(self)
        return values[name]  # type: ignore[no-any-return]

    return called


@dataclass(frozen=True)
class World:
    """A run in plain values, with one result in any process."""

    trace: str  # file or shipped name
    policy: str = "optimus"  # SPEC, TOML file or SPEC@PROFILE
    profile: str = DEFAULT
    workload: str | None = None  # None: the profile's first
    yields: str | None = None  # replaces the profile's (profiler/given_yield.py)
    frontend: float | None = None  # s between client and engine, both directions; None: the profile's
    variation: tuple[tuple[str, float], ...] = ()  # causes and scores (profiler/uncertainty.py)
    replicas: int = 1
    router: str = "round-robin"  # or `path/to/file.py:NAME`
    pools: tuple[str, ...] = ()  # `[NAME:]COUNT@PROFILE,POLICY`; replace policy, profile and replicas
    links: tuple[str, ...] = ()  # `BANDWIDTH[,LATENCY][,field=value...]`
    decider: str = "always"  # which requests prefill elsewhere; SPEC like `scaler`
    scaler: str = FIXED  # `name[,field=value...]`, or `path/to/file.py:NAME[,field=value...]`
    startup: float = 0.0  # s, of a replica
    arrival: str = "trace"  # or a process, as `gamma,cv=2`
    rate: float | None = None  # req/s
    lengths: str | None = None
    concurrency: int | None = None  # closed loop
    sessions: bool = False  # the next turn follows the previous one
    num_requests: int | None = None
    time_unit: str | None = None
    skip_bad: bool = False
    columns: str | None = None  # the trace's names, as in `dsim.traces.load`
    only: str | None = None  # `model=NAME` or `COLUMN=VALUE`
    emit: str = "block"
    eos: bool | None = None  # an EOS ends requests; None: if `lengths` names a workload
    drain: bool = True
    slos: tuple[str, ...] = ()
    seed: int = 0
    slower: float = 1.0  # steps take so many times as long
    profile_object: Profile | None = None  # in place of `profile`
    # Not part of the question.
    allow_code: AllowedCode = field(default=NO_CODE, repr=False, compare=False)
    check_rules: bool = field(default=False, repr=False, compare=False)  # Policy.checked

    def __post_init__(self) -> None:
        if self.yields is not None and self.workload is not None:
            raise DsimError(f"workload is {self.workload} and a yield of {self.yields} is given, expected one of them")
        if self.frontend is not None and not 0 <= self.frontend < math.inf:
            raise DsimError(f"frontend is {self.frontend} s, expected at least 0 and finite")
        if self.replicas > MAX_REPLICAS:
            raise DsimError(f"replicas is {cut(self.replicas)}, expected at most {MAX_REPLICAS}")
        if self.pools and (self.replicas != 1 or self.yields is not None or self.variation):
            raise DsimError("pools are given and replicas, yields or a variation too, expected pools alone")
        if self.links and len(self.pools) < 2:
            raise DsimError(f"link is {cut(self.links[0])} and {len(self.pools)} pools are given, expected 2 or more")
        if self.decider != "always" and not self.links:
            raise DsimError(f"decider is {cut(self.decider)} and no link is given, expected one from a prefill pool")
        if self.startup and self.scaler == FIXED:
            raise DsimError(
                f"startup is {self.startup:g} s and the scaler is {FIXED}, expected one that starts replicas"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without what `once` holds, such as policies of a user's file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def located(self) -> "World":
        """With absolute paths, for a process in another folder."""
        return self.with_files(lambda path: str(Path(path).absolute()))

    def with_files(self, place: Callable[[str], str]) -> "World":
        """With `place(path)` for each file."""
        files: dict[str, Any] = {
            name: with_files(getattr(self, name), place) for name in ("router", "scaler", "decider")
        }
        if os.path.isfile(self.trace):
            files["trace"] = place(self.trace)
        if pages := yield_files(self.yields or ""):
            files["yields"] = ",".join(map(place, pages))
        path, _ = without_limit(self.lengths or "")
        if path and os.path.isfile(path):
            files["lengths"] = place(path) + (self.lengths or "")[len(path) :]
        files["profile"] = with_file_of(self.profile, place)
        files["policy"] = _with_files(self.policy, place)
        files["pools"] = tuple(_pool_with_files(text, i, place) for i, text in enumerate(self.pools))
        return replace(self, **files)

    def source(self) -> Trace:
        """As in its file."""
        options = {name: getattr(self, name) for name in ("time_unit", "skip_bad", "columns", "only")}
        return _load(self.trace, _changed(self.trace), **options)

    def longest(self) -> Trace:
        """The requests that decide whether a setting fits the memory."""
        return longest(self._asked)

    @property
    def _asked(self) -> Trace:
        return self.source() if self.lengths is None else self.requests()

    def per_million_tokens(self, hourly: float, rate: float) -> float:
        """Price of as many tokens of answers, of a fleet that costs `hourly`, at `rate` req/s."""
        return hourly / (3600 * rate * float(self._asked.output_length.mean())) * 1e6

    def check_fits(self) -> None:
        """ProfileError if a pool's largest forward exceeds the memory."""
        requests = self.longest()
        for _, setting in self.each_pool():
            check_fits(setting, requests)

    def requests(self) -> Trace:
        """The requests to replay; DsimError if none has the class of an SLO."""
        names = ("arrival", "rate", "num_requests", "seed", "lengths")
        ready = prepare(self.source(), **{name: getattr(self, name) for name in names})
        for text in self.slos:
            Slo.parse(text).check_class(classes(ready))
        return with_estimates(ready, self.seed)

    @property
    def label(self) -> str:
        """Policy or pools, for tables."""
        return " + ".join(self.pools) or self.policy

    @property
    def ends_at_eos(self) -> bool:
        """Whether an EOS that no scheduler foresees ends requests; by default if a workload is named."""
        if self.eos is not None:
            return self.eos
        return without_limit(self.lengths or "")[0] in LENGTHS

    @property
    def num_replicas(self) -> int:
        """At the start."""
        return sum(spec.count for spec, _ in self._by_pool())

    @property
    def num_gpus(self) -> int:
        """At the start."""
        return sum(spec.count * setting.profile.device.count for spec, setting in self.each_pool())

    @once
    def _by_pool(self) -> "list[tuple[PoolSpec, World]]":
        """Each pool, and the world of it alone."""
        pools = []
        alone = replace(self, pools=(), links=(), decider="always")
        for spec in PoolSpec.parse_all(self.pools):
            pools.append((spec, replace(alone, policy=f"{spec.policy}@{spec.profile}", replicas=spec.count)))
        return pools or [(PoolSpec("pool", self.replicas, self.profile, self.policy), self)]

    @property
    def _first(self) -> "World":
        return self._by_pool()[0][1]

    @once
    def parsed_policy(self) -> Policy:
        """Of pools the first one's, named with their label."""
        if self.pools:
            return replace(self._first.parsed_policy(), name=self.label)
        spec, profile = placed(self.policy)
        policy = replace(parse(spec, self.allow_code), checked=self.check_rules)
        if profile is not None:
            policy = replace(policy, name=self.policy)
        return policy

    @once
    def loaded_profile(self) -> Profile:
        """The (first pool's) profile with front end, yields, variation, and steps `slower` times as long."""
        if self.pools:
            return self._first.loaded_profile()
        profile = self.base_profile()
        if self.frontend is not None:
            profile = replace(profile, frontend=self.frontend)
        if self.yields is not None:
            from ..profiler.given_yield import with_yield  # loads SciPy, as the next

            profile = with_yield(profile, self.yields, self.parsed_policy())
        if self.variation:
            from ..profiler.uncertainty import varied

            setting = Setting(self.parsed_policy(), profile, self.workload)
            thresholds = [model for model in setting.by_threshold.values() if model != setting.drawn]
            profile = varied(profile, self.variation, setting.drawn, thresholds)
        if self.slower != 1.0:
            profile = replace(profile, latency=profile.latency.scaled(self.slower))
        return profile

    @once
    def routing(self) -> Routing:
        return routing(self.router, self.allow_code)

    def fleet(self) -> Fleet:
        (first, _), *further = self.each_pool()
        pools = [(first, self.setting()), *further]
        return Fleet(
            tuple(Pool(setting, spec.count, spec.name, self.startup) for spec, setting in pools),
            self.routing(),
            scaling(self.scaler, self.allow_code),
            links=tuple(map(Link.parse, self.links)),
            least_uncached=least_uncached(self.decider),
        ).with_ends()

    def of_each_pool(self) -> "list[World]":
        return [world for _, world in self._by_pool()]

    def each_pool(self) -> "Iterator[tuple[PoolSpec, Setting]]":
        return ((spec, world.setting()) for spec, world in self._by_pool())

    @once
    def setting(self) -> Setting:
        return Setting(self.parsed_policy(), self.loaded_profile(), self.workload)

    @once
    def base_profile(self) -> Profile:
        """The policy's profile, else the world's, with the implementation's costs."""
        if self.pools:
            return self._first.base_profile()
        return as_run_by(self.file_profile(), self.parsed_policy())

    @once
    def file_profile(self) -> Profile:
        """As in its file, or the object."""
        if self.profile_object is not None:
            return self.profile_object
        name = placed(self.policy)[1] or self.profile
        return _load_profile(name, _changed(located(name)[0] or ""))

    def simulate(
        self,
        requests: Trace | None = None,
        *,
        append: Append | None = None,
        ordered: bool = True,
        progress: Progress | None = None,
    ) -> RunRecords:
        """requests: `self.requests()`, if loaded; others as in `twin.simulate`."""
        return simulate(
            requests or self.requests(),
            self.fleet(),
            eos=self.ends_at_eos,
            append=append,
            ordered=ordered,
            progress=progress,
            **{name: getattr(self, name) for name in ("seed", "emit", "concurrency", "sessions", "drain")},
        )

    def simulate_whole(self, requests: Trace, append: Append | None = None) -> RunRecords:
        """Replay to the end, or KeyboardInterrupt. append: gets steps ordered by replica only."""
        result = self.simulate(requests, append=append, ordered=False)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

    def summarize(self, result: RunRecords, requests: Trace | None = None) -> Summary:
        """requests: `self.requests()`, if loaded."""
        slos = [Slo.parse(text) for text in self.slos]
        columns = result.table.columns
        if any(slo.slo_class is not None for slo in slos):
            columns = columns | {"slo_class": class_column(requests or self.requests())}
        return summarize(
            self.label,
            arrived(result, columns),
            result.totals,
            slos,
            replicas=self.num_replicas,
            replica_time=result.replica_time,
            closed_loop=self.concurrency is not None,
            caches_prefixes=caches_prefixes(result.policy) or result.cached_tokens is not None,
        )

    def run(self, requests: Trace | None = None) -> Summary:
        """Replay to the end and summarize."""
        requests = requests or self.requests()
        return self.summarize(self.simulate_whole(requests), requests)


def on_fleet(worlds: Sequence[World], words: FleetWords, trusted: bool = True) -> list[World]:
    """Put worlds on a fleet; with pools there is one.

    trusted: by the caller, not a file, so the code may be loaded.
    """
    code = NO_CODE
    if trusted:
        pools = PoolSpec.parse_all(words.pools)
        code = named_code([words.scaler, words.decider, *(spec.policy for spec in pools)])
    placed_worlds = [replace(world, **vars(words), allow_code=world.allow_code | code) for world in worlds]
    if words.pools:
        del placed_worlds[1:]
    for world in placed_worlds:
        world.fleet().check()
    return placed_worlds


def _with_files(policy: str, place: Callable[[str], str]) -> str:
    """A SPEC with other paths."""
    spec, profile = placed(policy)
    if os.path.isfile(spec):
        spec = place(spec)
    else:
        spec = with_files(spec, place)
    return "@".join([spec, *(with_file_of(name, place) for name in filter(None, [profile]))])


def _pool_with_files(pool: str, index: int, place: Callable[[str], str]) -> str:
    """A pool with other paths."""
    spec = PoolSpec.parse(pool, index)
    policy, _, profile = _with_files(f"{spec.policy}@{spec.profile}", place).rpartition("@")
    return f"{pool.partition('@')[0]}@{profile},{policy}"


def named_code(policies: Iterable[str], files: Iterable[FilePath] = ()) -> AllowedCode:
    """The code that a caller allows: `files`, and those in SPECs of policies, router and scaler.

    A policy's TOML file may be someone else's, so its files are not allowed.
    """
    sources = [file for policy in policies for file in named_files(placed(policy)[0])]
    return allowed([*sources, *files])


@dataclass(frozen=True)
class Setup:
    """A search's inputs, for its page: what was asked, under which version, without time or place."""

    dsim: str  # version
    command: str
    trace: str
    traffic: str  # the trace with its arrivals and lengths, in words
    trace_sha256: str
    arrival: str
    profile: str  # names
    estimated: bool  # a profile was not measured
    device: str
    model: str
    profile_version: str
    workload: str | None  # None: of next-token policies
    frontend: float  # s between a client and the engine
    router: str
    emit: str
    slos: tuple[str, ...]
    seed: int
    gpu_hour: float | None
    currency: str


def setup_of(world: World, command: str, gpu_hour: float | None, currency: str) -> Setup:
    source, profile = world.source(), world.loaded_profile()
    traffic = f"{source.name}, {len(source):,} requests"
    if world.arrival != "trace":
        traffic += f", arrivals: {world.arrival}"
    if world.lengths is not None:
        traffic += f", lengths: {world.lengths}"
    return Setup(
        dsim=__version__,
        command=command,
        trace=source.name,
        traffic=traffic,
        trace_sha256=digest(source)[:16],
        profile=profile.name,
        estimated=profile.is_estimate,
        device=profile.device.name,
        model=profile.model.name,
        profile_version=profile.provenance.tool_version,
        workload=workload_of(world.parsed_policy(), profile, world.workload),
        frontend=profile.frontend,
        gpu_hour=gpu_hour,
        currency=currency,
        **{name: getattr(world, name) for name in ("arrival", "router", "emit", "slos", "seed")},
    )


def on_profiles(setup: Setup, profiles: Iterable[Profile]) -> Setup:
    """The setup of several profiles, each named once."""
    by_name = {profile.name: profile for profile in profiles}
    return replace(
        setup,
        profile=", ".join(by_name),
        device=", ".join(dict.fromkeys(profile.device.name for profile in by_name.values())),
        model=", ".join(dict.fromkeys(profile.model.name for profile in by_name.values())),
        estimated=any(profile.is_estimate for profile in by_name.values()),
    )


def workload_of(policy: Policy, profile: Profile, name: str | None) -> str | None:
    """Of the commit model or law; None for next-token policies."""
    if policy.commits_by == "acceptance":
        return None
    models: Sequence[CanvasLaw | CommitModel] = profile.commits
    if policy.commits_by == "law":
        models = profile.canvas_laws
    return name or next((model.workload for model in models), None) or next(iter(profile.workloads), None)


def different(names: list[str], what: str = "policy") -> list[str]:
    """PolicyError if a name is given twice."""
    for name in names:
        if names.count(name) > 1:
            raise PolicyError(f"{what} {name} is given {names.count(name)} times, expected once")
    return names


def replicas_of(policies: Sequence[str], replicas: int | None) -> int:
    """As given, else as in the policies' files, else 1."""
    if replicas is not None:
        return replicas
    counts: dict[str, Any] = {}
    for policy in policies:
        if policy.endswith(".toml") and Path(policy).is_file():  # a pipe might never end
            with suppress(DsimError):  # `parse` reports it
                content = read_toml(policy)
                if "replicas" in content:
                    counts[policy] = content["replicas"]
    for policy, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PolicyError(f"{policy}: replicas is {quoted(count)}, expected a whole number of at least 1")
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{policy} asks for {count}" for policy, count in counts.items())
        raise PolicyError(f"{numbers} replicas, expected --replicas N")
    return next(iter(counts.values()), 1)


def digest(requests: Trace) -> str:
    """SHA-256 of all columns, not of the path."""
    columns = [requests.arrival, requests.input_length, requests.output_length]
    content = hashlib.sha256(b"".join(column.tobytes() for column in columns))
    content.update(repr(sorted(requests.extras.items())).encode())
    return content.hexdigest()


def classes(requests: Trace) -> set[str]:
    return {str(name) for name in requests.extras.get("slo_class", []) if name is not None}


def class_column(requests: Trace) -> npt.NDArray[np.object_]:
    return np.array(requests.extras.get("slo_class", [None] * len(requests)), dtype=object)


def arrived(result: RunRecords, columns: Columns | None = None) -> Columns:
    """Request columns with a prefix cache's; after an interrupt, only of arrived requests."""
    moves = result.moves or {}
    columns = {**(columns or result.table.columns), **moves}
    if result.cached_tokens is not None:
        columns["cached_tokens"] = result.cached_tokens
    if not result.interrupted:
        return columns
    arrivals = columns["replica"] >= 0
    if "prefill_replica" in moves:
        arrivals |= moves["prefill_replica"] >= 0
    return rows_of(columns, arrivals)


def _changed(path: FilePath) -> int:
    """When a file was; 0 for a shipped name."""
    return Path(path).stat().st_mtime_ns if os.path.isfile(path) else 0


@lru_cache(maxsize=8)
def _load_profile(name: str, _changed: int) -> Profile:
    return load_profile(name)


@lru_cache(maxsize=8)
def _load(trace: str, _changed: int, **options: Any) -> Trace:
    return load(trace, **options)
