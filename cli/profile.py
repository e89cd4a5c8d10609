"""`dsim profile` and `dsim profiles`: make a profile, and list the shipped ones."""

import json as json_format
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import DsimError
from ..profiler import hardware, models
from ..profiler import roofline as rooflines
from ..profiler.profile import Profile, gb, save, shipped

MAX_PREFILL_TOKENS = 4096  # LMDeploy's default


def profile_command(
    roofline: Annotated[str | None, typer.Option(metavar="GPU", help="Derive the profile from data sheets.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name, such as SDAR-8B.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs a replica (tensor parallel).")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Without captured graphs, as LMDeploy runs.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The profile file to write.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Derive a profile for hardware you do not own."""
    if roofline is None:
        raise DsimError("measuring comes with `dsim live` and is not there yet; pass --roofline GPU --model MODEL")
    if model is None:
        raise DsimError(f"--model is missing, expected one of {', '.join(models.MODELS)}")
    gpu, shape = hardware.gpu(roofline), models.model(model)
    name = output.stem if output else None
    profile = rooflines.roofline(gpu, shape, tp, graphs=not eager, name=name, date=date.today().isoformat())
    facts = _facts(profile, rooflines.knee(gpu, shape, tp))
    if output is not None:
        save(profile, output, force)
    if json:
        print(json_format.dumps({**facts, "written": str(output) if output else None}, indent=2))
        return
    print(f"{profile.description}: {profile.verdict}")
    for line in _lines(facts):
        print("  " + line)
    if output is not None:
        print(f"Wrote {output}")


def profiles_command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the shipped profiles."""
    held = shipped()
    if json:
        print(json_format.dumps(held, indent=2))
        return
    width = max(map(len, held), default=0)
    for name, description in held.items():
        print(f"{name:{width}}  {description}")


def _facts(profile: Profile, knee: float) -> dict[str, object]:
    """What was derived, in the units of the profile."""
    latency, memory = profile.latency, profile.memory
    pages, prefill = memory.fit(rooflines.PAGE, profile.default_max_batch, MAX_PREFILL_TOKENS)
    return {
        "name": profile.name,
        "origin": profile.origin,
        "knee_tokens": round(knee),
        "floor_s": max(latency.launch, latency.pieces(1)) + latency.host_step,
        "floor_is_launch": latency.launch > latency.pieces(1),
        "slope_s_per_token": latency.slope,
        "weight_bytes": memory.weight_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "page": rooflines.PAGE,
        "num_pages": pages,
        "max_batch": profile.default_max_batch,
        "max_prefill_tokens": prefill,
        "relative_uncertainty": profile.fit.relative_uncertainty,
        "workloads": list(profile.workloads),
    }


def _lines(facts: dict[str, object]) -> list[str]:
    f = {key: value for key, value in facts.items() if isinstance(value, int | float)}
    bound = "kernel launches" if facts["floor_is_launch"] else "reading the weights"
    workloads = facts["workloads"]
    names = ", ".join(workloads) if isinstance(workloads, list) and workloads else "none: it can run `ar` only"
    return [
        f"knee      {f['knee_tokens']} tokens a step: reading the weights takes as long as multiplying with them",
        f"floor     {f['floor_s'] * 1e3:.2g} ms a step, set by {bound}",
        f"slope     {f['slope_s_per_token'] * 1e6:.2g} us a token beyond the knee, before attention and LM head",
        f"memory    weights take {gb(f['weight_bytes'])} of {gb(f['capacity_bytes'])}",
        f"KV pages  {f['num_pages']} of {f['page']} tokens, at a batch of {f['max_batch']} and prefills of "
        f"{f['max_prefill_tokens']} tokens",
        f"commits   {names}",
        f"trust     latencies to about ±{f['relative_uncertainty']:.0%}",
    ]
