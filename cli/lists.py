"""dsim policies: the presets, one line each."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from . import options
from .options import option
from .screen import print_json, show


def policies(
    as_json: options.AsJson = False,
    fields: Annotated[
        str | None, option("SPEC", "Show one policy's fields: default, allowed values, meaning.", "--fields")
    ] = None,
    allow_code: options.AllowCode = None,
) -> None:
    """List the policies' presets and the fields that a SPEC can set.

    dsim policies
    dsim policies --fields optimus
    """
    if fields is not None:
        _print_fields(fields, as_json, allow_code or [])
        return
    from ..engine.policy import PRESETS, describe, settings_of

    if as_json:
        print_json({name: describe(preset.policy) for name, preset in PRESETS.items()}, indent=2)
        return
    width = max(len(f"{name}[:{preset.main}]") for name, preset in PRESETS.items())
    for name, preset in PRESETS.items():
        show(f"{f'{name}[:{preset.main}]':<{width}}  {preset.summary}")
    known = dict.fromkeys(field for preset in PRESETS.values() for field in settings_of(preset.policy))
    show(f"\nA SPEC is name[:value][,field=value...]; the fields are {', '.join(known)}.")


def _print_fields(spec: str, as_json: bool, allow_code: list[Path]) -> None:
    """By axis, with values and the paper or file that the policy follows."""
    from ..engine.part import AXES, fields_of
    from ..engine.policy import name_of, parse, preset_of
    from ..results.scenario import named_code

    code = named_code([spec], allow_code)
    policy, preset = parse(spec, code), preset_of(name_of(spec), spec, code)
    axes = {axis: fields_of(getattr(policy, axis)) for axis in AXES}
    if as_json:
        listed = [{"axis": axis, **asdict(field)} for axis, found in axes.items() for field in found]
        about = {"name": policy.name, "summary": preset.summary, "citation": preset.citation, "main": preset.main}
        print_json({**about, "fields": listed}, indent=2)
        return
    show(f"{policy.name}: {preset.summary}" if preset.summary else policy.name)
    if preset.citation:
        show(f"Source: {preset.citation}")
    if preset.main:
        show(f"{name_of(spec)}:VALUE sets {preset.main}.")
    for axis, found in axes.items():
        if found:
            show(f"\n{axis} ({type(getattr(policy, axis)).__name__})")
        for field in found:
            show(f"  {field.name} = {value_of(field.default)}: {field.meaning or 'no meaning given'} [{field.bounds}]")


def value_of(value: Any) -> str:
    """A default as in a SPEC."""
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool | None) else str(value)
