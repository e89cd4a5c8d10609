"""dsim policies: what there is, one line each."""

import json
from typing import Annotated

import typer


def policies(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the policies' presets and the fields that a SPEC can set."""
    from ..engine.policy import PRESETS, describe, settings_of

    if as_json:
        typer.echo(json.dumps({name: describe(preset.policy) for name, preset in PRESETS.items()}, indent=2))
        return
    width = max(len(f"{name}[:{preset.main}]") for name, preset in PRESETS.items())
    for name, preset in PRESETS.items():
        typer.echo(f"{f'{name}[:{preset.main}]':<{width}}  {preset.summary}")
    fields = dict.fromkeys(field for preset in PRESETS.values() for field in settings_of(preset.policy))
    typer.echo(f"\nA SPEC is name[:value][,field=value...]; the fields are {', '.join(fields)}.")
