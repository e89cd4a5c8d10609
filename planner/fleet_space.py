"""The space of a search over pools: `POOL.FIELD`, `replicas`, `decider`, `link.FIELD`."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError, PolicyError
from ..engine.policy import Policy, preset_of, settings_of
from ..files.read import did_you_mean, quoted, read_toml
from ..results.fleet_file import FleetWords
from ..results.scenario import Scenario
from ..sim.fleet import MAX_REPLICAS, PoolSpec, with_ends
from ..sim.link import Link
from .space import (
    REPLICAS,
    Choice,
    Dimension,
    beyond_tested,
    candidate_of,
    dimension_of,
    fields_to_move,
    held,
    searchable,
    space_of,
    spelt,
)

FLEET = ""  # in place of a preset's name
DECIDER, LINK = "decider", "link"
DECIDERS = ("always", "uncached,tokens=512", "uncached,tokens=2048")
LINK_FIELDS = ("sharing", "overlap", "reserve", "lease")  # engines' flags; bandwidth is bought
MOST_FLEETS = 1024  # counts to choose from
Counts = tuple[int, ...]  # replicas by pool


@dataclass(frozen=True)
class FleetCandidate:
    words: FleetWords
    policies: tuple[Policy, ...] = field(repr=False, compare=False)  # of decoding pools
    columns: Mapping[str, str] = field(repr=False, compare=False)  # chosen values by name
    untested: tuple[str, ...] = field(repr=False, compare=False)  # see `beyond_tested`
    preset: ClassVar[str] = FLEET
    file: ClassVar[str] = "fleet.toml"  # holds `toml`

    @property
    def spec(self) -> str:
        words = self.words
        parts = [" + ".join(words.pools), *(f"link {link}" for link in words.links)]
        return ", ".join([*parts, *([f"decider {words.decider}"] if words.links else [])])

    @property
    def counts(self) -> Counts:
        return tuple(spec.count for spec in PoolSpec.parse_all(self.words.pools))

    @property
    def replicas(self) -> int:
        return sum(self.counts)

    @property
    def arguments(self) -> tuple[str, ...]:
        words = self.words
        said = [item for pool in words.pools for item in ("--pool", pool)]
        said += [item for link in words.links for item in ("--link", link)]
        said += ["--router", words.router] if words.router != FleetWords.router else []
        return (*said, *(["--decider", words.decider] if words.decider != FleetWords.decider else []))

    def posed(self, scenario: Scenario) -> Scenario:
        words = self.words
        return replace(scenario, pools=words.pools, links=words.links, decider=words.decider)

    def to_json(self) -> dict[str, Any]:
        words = self.words
        return {
            "policy": self.spec, "replicas": in_words(self.counts), "pools": list(words.pools),
            "links": list(words.links), "decider": words.decider,
        }  # fmt: skip

    def toml(self) -> str:
        return self.words.toml()

    def __str__(self) -> str:
        return self.spec


@dataclass(frozen=True)
class FleetSpace:
    """Values that each field of a fleet may take; other fields stay as given."""

    words: FleetWords  # as given
    fields: Mapping[str, Dimension]  # `POOL.FIELD`, `replicas` (of all pools: 1+3), `decider`, `link.FIELD`
    notes: tuple[str, ...] = ()
    allow_code: AllowedCode = field(default=NO_CODE, repr=False)

    @cached_property
    def dimensions(self) -> Mapping[str, Mapping[str, Dimension]]:
        """As in a space of policies."""
        return {FLEET: self.fields}

    def candidate(self, preset: str, values: Mapping[str, Any], replicas: int = 1) -> FleetCandidate:
        """preset, replicas: unused."""
        specs = PoolSpec.parse_all(self.words.pools)
        counts = [str(spec.count) for spec in specs]
        if REPLICAS in values:
            counts = str(values[REPLICAS]).split("+")
        pools, policies = [], []
        untested: list[str] = []
        links = tuple(_with_fields(text, _own(LINK, values)) for text in self.words.links)
        sources = _sources(self.words)
        for spec, count in zip(specs, counts, strict=True):
            base, own = candidate_of(spec.policy, allow_code=self.allow_code), _own(spec.name, values)
            count = own.pop(REPLICAS, count)
            chosen = dict(base.settings) | {name: spelt(value) for name, value in own.items()}
            policy = ",".join([base.preset, *(f"{name}={value}" for name, value in chosen.items())])
            policy = candidate_of(policy, allow_code=self.allow_code).spec
            untested += beyond_tested(policy, self.allow_code)
            pools.append(str(replace(spec, count=int(count), policy=policy)))
            if spec.name not in sources:
                policies.append(policy)
        words = replace(
            self.words, pools=tuple(pools), links=links, decider=str(values.get(DECIDER, self.words.decider))
        )
        parsed = tuple(candidate_of(policy, allow_code=self.allow_code).policy for policy in policies)
        has = self._fields_of(words)
        return FleetCandidate(words, parsed, {name: spelt(has[name]) for name in self.fields}, tuple(untested))

    def values_of(self, candidate: FleetCandidate) -> dict[str, Any]:
        """The candidate's values that the dimensions hold."""
        return held(self.fields, self._fields_of(candidate.words))

    def _fields_of(self, words: FleetWords) -> dict[str, Any]:
        """Fields that a space can move."""
        specs = PoolSpec.parse_all(words.pools)
        fields: dict[str, Any] = {REPLICAS: in_words([spec.count for spec in specs]), DECIDER: words.decider}
        for spec in specs:
            own = candidate_of(spec.policy, allow_code=self.allow_code)
            known = settings_of(preset_of(own.preset, allow_code=self.allow_code).policy) | dict(own.settings)
            fields |= {f"{spec.name}.{name}": value for name, value in known.items()}
        if words.links:
            link = Link.parse(words.links[0])
            fields |= {f"{LINK}.{name}": getattr(link, name) for name in LINK_FIELDS}
        return fields

    def to_json(self) -> dict[str, Any]:
        return {"fleet": {name: dataclasses.asdict(dimension) for name, dimension in self.fields.items()}}


def fleet_space(
    scenario: Scenario, table: Mapping[str, Any] | str | Path | None = None, gpus: int | None = None,
    by_cost: bool = False,
) -> FleetSpace:  # fmt: skip
    """The space of a scenario's pools; without a table, values worth trying on any traffic.

    gpus: the budget, by default the pools'. by_cost: include fleets that leave GPUs free. DsimError for a field that no
    pool has, and for a budget below the given fleet.
    """
    words = FleetWords(scenario.pools, scenario.links, scenario.router, scenario.decider)
    specs = PoolSpec.parse_all(words.pools)
    own_gpus = [setting.profile.device.count for _, setting in scenario.each_pool()]
    has = sum(spec.count * one for spec, one in zip(specs, own_gpus, strict=True))
    if gpus is not None and gpus < has:
        raise DsimError(f"gpus is {gpus} and the pools as given have {has}, expected at least as many")
    given, where = _table(table)
    fields: dict[str, Dimension] = {}
    counts: dict[str, list[int]] = {}
    for (spec, setting), alone in zip(scenario.each_pool(), scenario.of_each_pool(), strict=True):
        if spec.name in (DECIDER, LINK, REPLICAS):
            raise DsimError(f"pool {spec.name} has the name of a part of the space, expected another one")
        check = searchable(setting.profile, scenario.workload)
        preset = candidate_of(spec.policy, allow_code=scenario.allow_code).preset
        prefills = spec.name in _sources(words)
        if given is None:
            own = fields_to_move(preset, setting.profile, scenario.workload, check, scenario.allow_code)
            own = {name: value for name, value in own.items() if _moves(alone.parsed_policy(), name, prefills, words)}
        else:
            own = _section(given, spec.name, where)
            if REPLICAS in own:
                counts[spec.name] = _counts(own.pop(REPLICAS), f"{where}: {spec.name}")
        held_by = space_of({"policy": [preset], preset: own}, f"{where}: pool {spec.name}", check, scenario.allow_code)
        fields |= {f"{spec.name}.{name}": dimension for name, dimension in held_by.dimensions[preset].items()}
    if given is not None:
        names = [*(spec.name for spec in specs), *([DECIDER, LINK] if words.links else [])]
        for name in given:
            if name not in names:
                raise DsimError(
                    f"{where}: there is no {quoted(name)}{did_you_mean(name, names)}, expected {', '.join(names)}"
                )
    if words.links:
        fields |= _of_links(given, where, words)
    every = [counts.get(spec.name) for spec in specs]
    if given is None or gpus is not None or counts:
        budget = has if gpus is None and not counts else gpus
        fleets = _fleets(specs, every, own_gpus, budget, by_cost or bool(counts))
        fields[REPLICAS] = Choice(tuple(in_words(one) for one in fleets))
    space = FleetSpace(words, fields, allow_code=scenario.allow_code)
    space.candidate(FLEET, {}).posed(scenario).fleet().check()
    return space


def with_parts(words: FleetWords, values: Mapping[str, Any], allow_code: AllowedCode = NO_CODE) -> FleetWords:
    """The fleet with values of `POOL.FIELD`, `POOL.replicas` and `link.FIELD`; DsimError for a missing part."""
    known = [spec.name for spec in PoolSpec.parse_all(words.pools)]
    for name, value in values.items():
        part, _, of = name.partition(".")
        if part not in known and not (part == LINK and of in LINK_FIELDS and words.links):
            raise DsimError(
                f"{name} is {quoted(value)}{did_you_mean(part, known)}, expected a field of {', '.join(known)}"
            )
        if of == REPLICAS:
            _counts(value, part)
    return FleetSpace(words, {}, allow_code=allow_code).candidate(FLEET, values).words


def in_words(counts: Sequence[int]) -> str:
    """As in the scaler `schedule`: 1+3."""
    return "+".join(map(str, counts))


def _sources(words: FleetWords) -> set[str]:
    """Pools that only prefill."""
    names = [spec.name for spec in PoolSpec.parse_all(words.pools)]
    return {with_ends(Link.parse(text), names).source for text in words.links}


def _own(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A part's values: `POOL.chunk` becomes `chunk`."""
    return {name.removeprefix(f"{part}."): value for name, value in values.items() if name.startswith(f"{part}.")}


def _with_fields(text: str, chosen: Mapping[str, Any]) -> str:
    kept = [item for item in text.split(",") if item.partition("=")[0] not in chosen]
    return ",".join([*kept, *(f"{name}={spelt(value)}" for name, value in chosen.items())])


def _moves(policy: Policy, name: str, prefills: bool, words: FleetWords) -> bool:
    """Whether to vary a field: linked pools share a block length; decoding fields do nothing in prefill pools."""
    if words.links and name == "block_length":
        return False
    parts: tuple[Any, ...] = (policy.batching, policy.memory)
    return not prefills or any(name == f.name for part in parts for f in dataclasses.fields(part))


def _table(table: Mapping[str, Any] | str | Path | None) -> tuple[Mapping[str, Any] | None, str]:
    if table is None or isinstance(table, Mapping):
        return table, "space"
    return read_toml(table), str(table)


def _section(table: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, Mapping):
        raise DsimError(f"{where}: {name} is {quoted(found)}, expected a table of fields")
    return dict(found)


def _of_links(given: Mapping[str, Any] | None, where: str, words: FleetWords) -> dict[str, Dimension]:
    if given is None:
        return {DECIDER: Choice(tuple(dict.fromkeys([words.decider, *DECIDERS])))}
    fields: dict[str, Dimension] = {}
    if DECIDER in given:
        fields[DECIDER] = dimension_of(DECIDER, given[DECIDER], where)
    for name, value in _section(given, LINK, where).items():
        if name not in LINK_FIELDS:
            raise DsimError(
                f"{where}: [{LINK}] has no field {quoted(name)}{did_you_mean(name, LINK_FIELDS)}, expected "
                f"{', '.join(LINK_FIELDS)}"
            )
        fields[f"{LINK}.{name}"] = dimension = dimension_of(name, value, where)
        for probe in dimension.probes():
            try:
                Link.parse(_with_fields(words.links[0], {name: probe}))
            except PolicyError as error:
                raise PolicyError(f"{where}: {error}") from None
    return fields


def _counts(value: Any, where: str) -> list[int]:
    counts = [value] if isinstance(value, int) else value
    if isinstance(value, Mapping) and value.keys() == {"low", "high"} and all(type(v) is int for v in value.values()):
        counts = list(range(value["low"], min(value["high"], MAX_REPLICAS) + 1))
    if (
        not isinstance(counts, list)
        or not counts
        or any(type(n) is not int or not 1 <= n <= MAX_REPLICAS for n in counts)
    ):
        raise DsimError(f"{where}.{REPLICAS} is {quoted(value)}, expected whole numbers of at least 1")
    return counts


def _fleets(
    specs: Sequence[PoolSpec], every: Sequence[Sequence[int] | None], gpus: Sequence[int], budget: int | None,
    small: bool,
) -> list[Counts]:  # fmt: skip
    """small: include counts that leave GPUs for another replica."""
    if budget is not None and budget > MAX_REPLICAS:
        raise DsimError(f"gpus is {budget}, expected at most {MAX_REPLICAS}")
    if all(own is None for own in every):
        every = [range(1, max(2, (budget or 0) // own + 1)) for own in gpus]
    choices = [[spec.count] if own is None else own for spec, own in zip(specs, every, strict=True)]
    found: list[Counts] = []
    for counts in itertools.product(*choices):
        used = sum(n * own for n, own in zip(counts, gpus, strict=True))
        if budget is not None and (used > budget or (not small and used + min(gpus) <= budget)):
            continue
        found.append(counts)
        if len(found) > MOST_FLEETS:
            raise DsimError(
                f"gpus is {budget} and allows more than {MOST_FLEETS} numbers of replicas, expected fewer: name them "
                "in a space file"
            )
    if not found:
        raise DsimError(f"no numbers of replicas of the space fit {budget} GPUs, expected some that do")
    return found
