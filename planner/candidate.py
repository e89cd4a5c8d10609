"""A point of a space: values of dotted fields, the world that has them, and which of equals is nearest."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError, PolicyError
from ..engine.policy import Policy, name_of, parse, preset_of, settings_of, to_toml
from ..files.read import cut, did_you_mean, quoted
from ..results.fleet_file import FleetWords
from ..results.world import World
from ..sim.fleet import MAX_REPLICAS, PoolSpec, with_ends
from ..sim.link import Link

T = TypeVar("T")
Point = Mapping[str, Any]  # `rate`, `policy.chunk`, `replicas`, `decode.max_batch`, `link.overlap` ...

POLICY, REPLICAS, DECIDER, LINK = "policy", "replicas", "decider", "link"
LINK_FIELDS = ("overlap",)  # an engine's flag; bandwidth is bought
FAR = 100  # changes that another preset counts


def world_at(world: World, point: Point) -> World:
    """The world with a point's values.

    `policy.FIELD` is appended to the SPEC; with pools `POOL.FIELD` to the pool's, `link.FIELD` to each link, and
    `replicas` may be the pools' (1+3). DsimError for a part that the world lacks.
    """
    parts: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in point.items():
        owner, dot, setting = name.partition(".")
        if dot:
            parts.setdefault(owner, {})[setting] = value
        else:
            plain[name] = value
    if not world.pools:
        policy = with_fields(plain.get(POLICY, world.policy), parts.pop(POLICY, {}))
        for owner, values in parts.items():
            name, value = next(iter(values.items()))
            raise DsimError(f"{owner}.{name} is {cut(value)} and there is no fleet, expected a file with its pools")
        return replace(world, **{**plain, POLICY: policy})
    specs = PoolSpec.parse_all(world.pools)
    _check_parts(parts, [spec.name for spec in specs], bool(world.links))
    counts: list[Any] = [spec.count for spec in specs]
    if REPLICAS in plain:
        counts = str(plain.pop(REPLICAS)).split("+")
    pools = []
    for spec, count in zip(specs, counts, strict=True):
        values = dict(parts.get(spec.name, {}))
        count = values.pop(REPLICAS, count)
        pools.append(str(replace(spec, count=int(count), policy=with_fields(spec.policy, values))))
    links, moved = [], parts.get(LINK, {})
    for link in world.links:
        words = [word for word in link.split(",") if word.partition("=")[0] not in moved]
        links.append(with_fields(",".join(words), moved))
    return replace(world, pools=tuple(pools), links=tuple(links), **plain)


def _check_parts(parts: Mapping[str, Mapping[str, Any]], pools: list[str], has_links: bool) -> None:
    for owner, values in parts.items():
        for name, value in values.items():
            if owner not in pools and not (owner == LINK and name in LINK_FIELDS and has_links):
                raise DsimError(
                    f"{owner}.{name} is {quoted(value)}{did_you_mean(owner, pools)}, expected a field of "
                    f"{', '.join(pools)}"
                )
            if name == REPLICAS and not (type(value) is int and 1 <= value <= MAX_REPLICAS):
                raise DsimError(f"{owner}.{REPLICAS} is {quoted(value)}, expected whole numbers of at least 1")


def grid(choices: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Every combination of the fields' values, the last field fastest."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def with_fields(spec: str, values: Mapping[str, Any]) -> str:
    """The SPEC with these fields appended."""
    return ",".join([spec, *(f"{name}={spelt(value)}" for name, value in values.items())])


def spelt(value: Any) -> str:
    """As in a SPEC."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def fields_of(world: World) -> dict[str, Any]:
    """The values of all fields of its fleet that a space can vary, by dotted name."""
    code = world.allow_code
    if not world.pools:
        values = settings_of(parse(world.policy, code))
        return {REPLICAS: world.replicas} | {f"{POLICY}.{name}": value for name, value in values.items()}
    specs = PoolSpec.parse_all(world.pools)
    values = {REPLICAS: _counts(world), DECIDER: world.decider}
    for spec in specs:
        values |= {f"{spec.name}.{name}": value for name, value in settings_of(parse(spec.policy, code)).items()}
    for link in world.links[:1]:
        values |= {f"{LINK}.{name}": getattr(Link.parse(link), name) for name in LINK_FIELDS}
    return values


def _counts(world: World) -> str:
    """Of its pools, such as `1+3`."""
    return "+".join(str(spec.count) for spec in PoolSpec.parse_all(world.pools))


def changed_fields(spec: str, allow_code: AllowedCode = NO_CODE) -> dict[str, str]:
    """A SPEC's or TOML file's fields that are not the preset's own; of an invalid SPEC those written."""
    preset = name_of(spec)
    preset_values = settings_of(preset_of(preset, spec, allow_code).policy)
    try:
        values = settings_of(parse(spec, allow_code))
    except PolicyError:
        if spec.split(",")[0] != preset:  # a TOML file, or an invalid main field
            raise
        pairs = (item.partition("=") for item in spec.split(",")[1:])
        return {name: value for name, _, value in pairs}
    return {name: spelt(value) for name, value in values.items() if value != preset_values[name]}


def plain_spec(spec: str, allow_code: AllowedCode = NO_CODE) -> str:
    """One SPEC for all that mean the same: the preset and its changed fields."""
    return with_fields(name_of(spec), changed_fields(spec, allow_code))


def policy_toml(spec: str, replicas: int, allow_code: AllowedCode = NO_CODE) -> str:
    """A policy's file."""
    return f"{to_toml(parse(spec, allow_code), name_of(spec), allow_code)}{REPLICAS} = {replicas}\n"


def beyond_tested(spec: str, allow_code: AllowedCode = NO_CODE) -> tuple[str, ...]:
    """The fields of a SPEC above what its engine's makers tested, in words."""
    preset = preset_of(name_of(spec), spec, allow_code)
    values = settings_of(parse(spec, allow_code)) if preset.tested else {}
    return tuple(
        f"{name}={values[name]} is beyond {largest}, the most that its engine is tested with ({source})"
        for name, (largest, source) in preset.tested.items()
        if values[name] is None or values[name] > largest
    )


def decoding_pools(world: World) -> list[PoolSpec]:
    """The pools that decide the answers: all but those that only prefill."""
    specs = PoolSpec.parse_all(world.pools)
    names = [spec.name for spec in specs]
    sources = {with_ends(Link.parse(link), names).source for link in world.links}
    return [spec for spec in specs if spec.name not in sources]


def refusal(check: Callable[..., object], *arguments: Any) -> DsimError | None:
    """Why a check refuses its arguments."""
    try:
        check(*arguments)
    except DsimError as error:
        return error
    return None


def nearest_first(
    equals: Iterable[T], num_changes: Callable[[T], int], distance: Callable[[T], float] = lambda _: 0.0
) -> list[T]:
    """Of equally good ones, those with the fewest changes to the default first, then by distance; stable."""
    return sorted(equals, key=lambda equal: (num_changes(equal), distance(equal)))


@dataclass(frozen=True)
class Candidate:
    """A fleet to try, as a world; two that mean the same are equal."""

    world: World
    columns: Mapping[str, str] = field(default_factory=dict, compare=False)  # the point's values, by the space's names

    @classmethod
    def at(cls, world: World, point: Point, columns: Mapping[str, str] | None = None) -> "Candidate":
        moved, code = world_at(world, point), world.allow_code
        specs = PoolSpec.parse_all(moved.pools)
        pools = tuple(str(replace(spec, policy=plain_spec(spec.policy, code))) for spec in specs)
        policy = moved.policy if pools else plain_spec(moved.policy, code)
        return cls(replace(moved, policy=policy, pools=pools), columns or {})

    @property
    def preset(self) -> str:
        """Empty for pools."""
        return "" if self.world.pools else name_of(self.world.policy)

    @property
    def spec(self) -> str:
        """The SPEC, or the pools with links and decider."""
        world = self.world
        parts = [world.label, *(f"link {link}" for link in world.links)]
        return ", ".join([*parts, *([f"decider {world.decider}"] if world.links else [])])

    @property
    def replicas(self) -> int | str:
        """Of pools `1+3`."""
        return _counts(self.world) or self.world.replicas

    @property
    def policies(self) -> list[Policy]:
        """The policies that decide the answers; PolicyError for contradictory fields."""
        specs = [pool.policy for pool in decoding_pools(self.world)] or [self.world.policy]
        return [parse(spec, self.world.allow_code) for spec in specs]

    @property
    def untested(self) -> tuple[str, ...]:
        """See `beyond_tested`."""
        pools = PoolSpec.parse_all(self.world.pools)
        specs = [pool.policy for pool in pools] or [self.world.policy]
        return tuple(text for spec in specs for text in beyond_tested(spec, self.world.allow_code))

    @property
    def arguments(self) -> list[str]:
        """Options of `dsim replay`."""
        world = self.world
        if not world.pools:
            replicas = ["--replicas", str(world.replicas)] if world.replicas > 1 else []
            return ["--policy", world.policy, *replicas]
        options = [word for pool in world.pools for word in ("--pool", pool)]
        options += [word for link in world.links for word in ("--link", link)]
        for name in ("router", DECIDER):
            if getattr(world, name) != getattr(FleetWords, name):
                options += [f"--{name}", getattr(world, name)]
        return options

    def file(self) -> tuple[str, str]:
        """The name and text of a file for `--policy` or `--fleet`."""
        world = self.world
        if world.pools:
            words = {f.name: getattr(world, f.name) for f in fields(FleetWords)}
            return "fleet.toml", FleetWords(**words).toml()
        return "policy.toml", policy_toml(world.policy, world.replicas, world.allow_code)

    def num_changes(self, default: "Candidate") -> int:
        """Fields that differ from the fleet as given, or from the engine's own; another preset counts more."""
        if self.world.pools:
            before, after = fields_of(default.world), fields_of(self.world)
            return sum(before[name] != value for name, value in after.items())
        changed = len(changed_fields(self.world.policy, self.world.allow_code))
        return changed + FAR * (self.preset != default.preset)

    def __str__(self) -> str:
        is_single = bool(self.world.pools) or self.world.replicas == 1
        return self.spec if is_single else f"{self.spec} on {self.replicas} replicas"
