"""Policies by name, shipped or in a file; their fields as text."""

import dataclasses
import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .allowed_code import NO_CODE, AllowedCode
from .core import answers_of
from .errors import PolicyError, cut, quoted
from .outside import check_names_object, from_file, is_file, running_code_of
from .part import AXES as AXES
from .part import Discipline as Discipline
from .part import Eviction, Granularity
from .part import PagedMemory as PagedMemory
from .part import Policy as Policy
from .part import Preset as Preset
from .plain import plain, words_of
from .policies import SHIPPED


def _presets() -> Iterator[tuple[str, Preset]]:
    for module in SHIPPED:
        yield from import_module(f".policies.{module}", __package__).PRESETS.items()


PRESETS: dict[str, Preset] = dict(_presets())

DISCIPLINE = "discipline"
CODE = re.compile(rf"(^|,{DISCIPLINE}=)([^,]*\.py)(?=:)")  # a file in a SPEC

MAX_NUMBER = 2**31 - 1  # of a field; the engine's arrays hold no more


def parse(spec: str, allow_code: AllowedCode = NO_CODE) -> Policy:
    """The policy of a SPEC, `name[:value][,field=value...]`, or of a path ending in .toml.

    A name is a preset's, or `path/to/file.py:NAME` of a Preset or Policy; `discipline=path/to/file.py:NAME` puts a
    discipline on it. CodeError if such a file is not in `allow_code`; PolicyError lists what is known for an unknown
    name, field or value.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    return _with_settings(preset.policy, spec, _settings(spec, preset))


def named_fields(spec: str, allow_code: AllowedCode = NO_CODE) -> set[str]:
    """Fields that a SPEC or its TOML file sets."""
    return set(_settings(spec, preset_of(name_of(spec), spec, allow_code)))


def _settings(spec: str, preset: Preset) -> dict[str, Any]:
    if spec.endswith(".toml"):
        return _named_in_toml(spec)[1]
    head, *items = spec.split(",")
    _, value = _name_and_value(head)
    if value is not None:
        if not preset.main:
            raise PolicyError(f"policy {_said(spec)}: the preset has no main field for {quoted(value)}")
        items = [f"{preset.main}={value}", *items]
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise PolicyError(f"policy {_said(spec)}: {quoted(item)} is not a field=value")
        if key in settings:
            pair = f"{cut(settings[key])} and {cut(value)}"
            raise PolicyError(f"policy {_said(spec)}: {cut(key)} is given twice, as {pair}")
        settings[key] = value
    settings.pop(DISCIPLINE, None)  # of the name
    return settings


def evicting_preset() -> str:
    """The preset that evicts by importance, with which executors' steps are measured."""
    return next(name for name, preset in PRESETS.items() if preset.policy.eviction.by_importance)


def every_step(limits: Mapping[str, int], granularity: Granularity, eviction: Eviction | None = None) -> Policy:
    """A policy that decides every step anew, to measure steps of a shape; limits: scheduler fields."""
    default: Any = Policy("every step")
    batching = replace(default.batching, num_loops=1, decide_ahead=False, **limits)
    return replace(default, batching=batching, granularity=granularity, eviction=eviction or default.eviction)


def name_of(spec: str) -> str:
    """What a SPEC's fields change: a preset's name or file, and the discipline put on it."""
    if spec.endswith(".toml"):
        return _named_in_toml(spec)[0]
    head, *items = spec.split(",")
    disciplines = [item for item in items if item.startswith(f"{DISCIPLINE}=")]
    return ",".join([_name_and_value(head)[0], *disciplines[:1]])


def files_of(spec: str) -> list[str]:
    """The code files of a SPEC's policy and discipline, also of one in a TOML file."""
    return named_files(name_of(spec))


def named_files(spec: str) -> list[str]:
    """The code files in a SPEC itself; a TOML file's word is not the user's."""
    if spec.endswith(".toml"):
        return []
    return [path for _, path in CODE.findall(spec)]


def with_files(spec: str, resolve: Callable[[str], str]) -> str:
    """The SPEC with its code files' paths replaced by `resolve(path)`."""
    if spec.endswith(".toml"):
        return spec
    return CODE.sub(lambda match: match[1] + resolve(match[2]), spec)


def _name_and_value(head: str) -> tuple[str, str | None]:
    if file := re.match(r"(.+\.py:\w+)(?::(.*))?$", head):
        return file[1], file[2]
    name, colon, value = head.partition(":")
    return name, value if colon else None


def _said(spec: str) -> str:
    """A SPEC for a message; one with a file is not cut."""
    if spec.endswith(".toml") or ".py:" in spec:
        return repr(spec)
    return quoted(spec)


def settings_of(policy: Policy) -> dict[str, Any]:
    """All fields by name, as `parse` takes them."""
    return {f.name: getattr(getattr(policy, axis), f.name) for axis in AXES for f in fields(getattr(policy, axis))}


def to_toml(policy: Policy, preset: str, allow_code: AllowedCode = NO_CODE) -> str:
    """The policy as TOML: the preset, and fields that differ from it."""
    base = settings_of(preset_of(preset, allow_code=allow_code).policy)
    lines = [f'policy = "{preset}"']
    for name, value in settings_of(policy).items():
        if value != base.get(name):
            if value is None or value == "":
                value = "none"
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def preset_of(name: str, spec: str = "", allow_code: AllowedCode = NO_CODE) -> Preset:
    """A preset by name, with a discipline if `name_of` gave one.

    PolicyError lists the known ones, CodeError refuses a file not in `allow_code`. Only this function loads a policy's
    code.
    """
    spec = spec or name
    asker = f"policy {_said(spec)}"
    name, under, discipline = name.partition(f",{DISCIPLINE}=")
    if under:
        return _under(preset_of(name, spec, allow_code), discipline, asker, allow_code)
    if name in PRESETS:
        return PRESETS[name]
    if is_file(name):
        value = from_file(name, (Preset, Policy), "policies", asker, allow_code)
        if isinstance(value, Policy):
            value = Preset(value)
        if not isinstance(value, Preset):
            raise PolicyError(
                f"{asker}: {name} is a {type(value).__name__}, expected a Preset or a Policy; a discipline stands "
                f"behind a preset, as in vllm-diffusion,{DISCIPLINE}={name}"
            )
        return value
    check_names_object(name, asker, "policy", "POLICY")
    raise PolicyError(
        f"{asker}: no preset is named {quoted(name)}{_hint(name, PRESETS)}; there are {', '.join(PRESETS)}"
    )


def _under(preset: Preset, name: str, asker: str, allow_code: AllowedCode) -> Preset:
    """A preset under the discipline of a file's Preset, Policy or Discipline, which brings its search space."""
    check_names_object(name, asker, "discipline", "POLICY")
    if not is_file(name):
        raise PolicyError(f"{asker}: {DISCIPLINE} is {quoted(name)}, expected path/to/file.py:NAME")
    value: Any = from_file(name, (Preset, Policy, Discipline), "policies and disciplines", asker, allow_code)
    space: Mapping[str, Any] = {}
    if isinstance(value, Preset):
        space, value = value.space or {}, value.policy
    if isinstance(value, Policy):
        value = value.discipline
    if isinstance(value, type) and issubclass(value, Discipline):
        with running_code_of(asker):
            value = value()
    if not isinstance(value, Discipline) or not value.questions:
        raise PolicyError(f"{asker}: {name} is a {type(value).__name__}, expected a discipline that answers a question")
    names = {f.name for f in fields(value)}
    space = {field: choices for field, choices in space.items() if field in names}
    return replace(
        preset, policy=replace(preset.policy, discipline=value), space={**(preset.space or {}), **space} or None
    )


def _hint(name: str, names: Iterable[str]) -> str:
    """The nearest of these names, as the words after a wrong one."""
    return "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(name, names, n=1))


def _named_in_toml(path: str) -> tuple[str, dict[str, Any]]:
    if not Path(path).is_file():  # reading a pipe may never end
        raise PolicyError(f"{path}: no such policy file")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise PolicyError(f"{path}: cannot be read as TOML: {cut(e)}") from None
    table.pop("replicas", None)  # results/world.py reads it
    name = table.pop("policy", None)
    if DISCIPLINE in table:
        name = f"{name},{DISCIPLINE}={table.pop(DISCIPLINE)}"
    if not isinstance(name, str):
        raise PolicyError(f'{path}: `policy` is {quoted(name)}, expected a preset\'s name such as "optimus"')
    return name, table


def _with_settings(policy: Policy, spec: str, settings: dict[str, Any]) -> Policy:
    homes = {f.name: axis for axis in AXES for f in fields(getattr(policy, axis))}
    axes: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in homes:
            hint, names = _hint(name, homes), ", ".join(homes)
            raise PolicyError(f"policy {_said(spec)}: there is no field {quoted(name)}{hint}; its fields are {names}")
        axis = homes[name]
        axes.setdefault(axis, {})[name] = _convert(spec, type(getattr(policy, axis)), name, value)
    try:
        # A smaller block also shrinks the field sized by it.
        size = policy.granularity.sized_by_block
        if size and "block_length" in axes.get("granularity", {}):
            values = axes["granularity"]
            values.setdefault(size, min(getattr(policy.granularity, size), values["block_length"]))
        changed = {axis: replace(getattr(policy, axis), **values) for axis, values in axes.items()}
        result = replace(policy, name=spec, **changed)
        answers_of(result)
        return result
    except PolicyError as e:
        reason = str(e).removeprefix("policy ").replace(f"{spec}: ", "", 1)
        raise PolicyError(f"policy {_said(spec)}: {reason}") from None


def _convert(spec: str, owner: type, name: str, value: Any) -> Any:
    """A field's value from text or TOML."""
    kind = _kinds(owner)[name]
    if isinstance(kind, types.UnionType):  # an optional number
        if value == "none":
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    try:
        converted = _converted(kind, value)
    except (ValueError, TypeError, OverflowError, KeyError):
        raise PolicyError(f"policy {_said(spec)}: {name} is {quoted(value)}, expected {words_of(kind)}") from None
    if isinstance(converted, int | float) and abs(converted) > MAX_NUMBER:
        raise PolicyError(f"policy {_said(spec)}: {name} is {cut(value)}, expected at most {MAX_NUMBER}")
    return converted


def _converted(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, str):
            value = value.split("/")
        if isinstance(value, int | float):
            value = [value]
        return tuple(plain(item(v), item) for v in value)
    if isinstance(value, str):
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        value = kind(value)
    return plain(value, kind)


_kinds = cache(typing.get_type_hints)


def describe(policy: Policy) -> dict[str, Any]:
    """Axes and fields as plain values, for manifests."""
    out: dict[str, Any] = {"name": policy.name}
    for axis in AXES:
        value = getattr(policy, axis)
        out[axis] = {"kind": type(value).__name__, **dataclasses.asdict(value)}
    return out
