"""A point of a space: values of dotted fields, the world that has them, and which of equals is nearest."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError, PolicyError
from ..engine.spec import name_of, parse, preset_of, settings_of, to_toml
from ..files.read import cut
from ..results.world import World

T = TypeVar("T")
Point = Mapping[str, Any]  # `rate`, `policy.chunk`, `replicas` ...

POLICY, REPLICAS = "policy", "replicas"
FAR = 100  # changes that another preset counts


def world_at(world: World, point: Point) -> World:
    """The world with a point's values; `policy.FIELD` is appended to the SPEC. DsimError for another dotted field."""
    fields = {name: value for name, value in point.items() if "." in name}
    plain = {name: value for name, value in point.items() if "." not in name}
    for name, value in fields.items():
        if not name.startswith(f"{POLICY}.") or world.pools:
            raise DsimError(f"{name} is {cut(value)}, expected fields of {POLICY} only, and none with a fleet's file")
    if fields:
        of_policy = {name.removeprefix(f"{POLICY}."): value for name, value in fields.items()}
        plain[POLICY] = with_fields(plain.get(POLICY, world.policy), of_policy)
    return replace(world, **plain)


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
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def changed_fields(spec: str, allow_code: AllowedCode = NO_CODE) -> dict[str, str]:
    """A SPEC's or TOML file's fields that are not the preset's own; of an invalid SPEC those written."""
    preset = name_of(spec)
    preset_values = settings_of(preset_of(preset, spec, allow_code).policy)
    try:
        policy = parse(spec, allow_code)
    except PolicyError:
        if spec.split(",")[0] != preset:  # a TOML file, or an invalid main field
            raise
        pairs = (item.partition("=") for item in spec.split(",")[1:])
        return {name: value for name, _, value in pairs}
    values = {name: value for name, value in settings_of(policy).items() if name not in policy.granularity.idle}
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
    values = settings_of(parse(spec, allow_code))
    return tuple(
        f"{name}={values[name]} is beyond {largest}, the most that its engine is tested with ({source})"
        for name, (largest, source) in preset.tested.items()
        if values[name] is None or values[name] > largest
    )


def on_replicas(policy: str, replicas: int) -> str:
    """A setting in words."""
    return policy + f" on {replicas} replicas" * (replicas > 1)


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
    """A setting to try, as a world; two that mean the same are equal."""

    world: World
    columns: Mapping[str, str] = field(default_factory=dict, compare=False)  # the point's values, by the space's names

    @classmethod
    def at(cls, world: World, point: Point, columns: Mapping[str, str] | None = None) -> "Candidate":
        moved = world_at(world, point)
        return cls(replace(moved, policy=plain_spec(moved.policy, world.allow_code)), columns or {})

    @property
    def preset(self) -> str:
        return name_of(self.world.policy)

    @property
    def untested(self) -> tuple[str, ...]:
        """See `beyond_tested`."""
        return beyond_tested(self.world.policy, self.world.allow_code)

    def fields(self) -> dict[str, str]:
        """The policy's fields and `replicas`, as spelt."""
        values = settings_of(parse(self.world.policy, self.world.allow_code))
        return {name: spelt(value) for name, value in {**values, REPLICAS: self.world.replicas}.items()}

    def num_changes(self, default: "Candidate") -> int:
        """Fields that differ from the engine's own; another preset counts more."""
        changed = len(changed_fields(self.world.policy, self.world.allow_code))
        return changed + FAR * (self.preset != default.preset)

    def __str__(self) -> str:
        return on_replicas(self.world.policy, self.world.replicas)
