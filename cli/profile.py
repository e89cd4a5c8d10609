"""`dsim profile` and `dsim profiles`: make a profile, and list the shipped ones."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError
from ..files.duration import seconds_of
from . import options
from .bar import Bar
from .options import option
from .screen import Screen, print_json, show

if TYPE_CHECKING:
    from ..api.profiled import Profiled
    from ..profiler.profile import Profile

NOT_VALID = 1


def profile_command(
    roofline: Annotated[
        str | None, option("GPU", "Derive the profile from a GPU's data sheet: its name, or a TOML (docs/plan.md).")
    ] = None,
    from_log: Annotated[
        Path | None, option("FILE", "Fit the profile to a step log of any engine (docs/steplog.md).", "--from-log")
    ] = None,
    client: Annotated[
        Path | None,
        option("FILE", "With --from-log: a load generator's file of the same time, to fit the front end.", "--client"),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "M",
            "What to measure: tiny, sdar-8b, a directory; with --roofline a name such as SDAR-8B, or a config.json.",
        ),
    ] = None,
    random_weights: options.RandomWeights = None,
    tp: Annotated[int, option("N", "GPUs of a replica (tensor parallel), with --roofline.")] = 1,
    weights: options.Weights = None,
    kv: options.Kv = None,
    eager: Annotated[bool, typer.Option("--eager", help="Without captured graphs, with --roofline.")] = False,
    device: Annotated[
        str | None, option("D", "cuda or cpu, to measure on; by default the GPU, if there is one.")
    ] = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    eos: options.EndsAtEos = False,
    full_sequence: Annotated[
        bool,
        typer.Option(
            "--full-sequence", help="Profile for policies that attend in both directions; no commits are logged."
        ),
    ] = False,
    budget: Annotated[str, option("T", "About how long it may take: 90s, 5m.")] = "5m",
    thresholds: Annotated[str, option("X,...", "Unmasking thresholds to log commits at: 0.8,0.9.")] = "0.9",
    temperature: Annotated[float, option("X", "Temperature at which commits are logged.")] = 1.0,
    prompts: Annotated[
        list[str] | None, option("FILE", "Text or token ids to log commits on, or NAME=FILE; repeat.", "--prompts")
    ] = None,
    yields: Annotated[
        str | None,
        option("P", "A profile that provides the commit models and importance deltas, for random weights.", "--yields"),
    ] = None,
    max_batch: Annotated[int | None, option("N", "Most sequences of a measured step.", "--max-batch")] = None,
    seed: options.Seed = 0,
    output: Annotated[Path | None, option("FILE", "The profile file to write.", "--output", "-o")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: options.AsJson = False,
) -> None:
    """Measure a profile, fit one to a log, or derive one for hardware you do not own.

    dsim profile --model tiny -o mine.json
    dsim profile --from-log steps.jsonl -o mine.json
    dsim profile --roofline H200 --model SDAR-8B -o h200.json

    Exits with 1 if the fit fails its own checks, and prints the reasons.
    """
    from ..api.profiled import profile

    if output is None and roofline is None and (from_log is not None or model or random_weights):
        raise DsimError("--output is missing: a fitted profile is written to a file (-o FILE)")
    page = samples = None
    if roofline is None and output is not None and output.name:
        page = output.with_suffix(".html")
        samples = output.with_suffix(".csv") if from_log is None else None
    total, screen = seconds_of(budget), Screen()
    with ExitStack() as stack:
        bar = Bar(screen, "measuring", "s", round(total))
        found = profile(
            model, random_weights=random_weights,
            roofline=roofline, from_log=from_log, client=client, tp=tp, weights=weights,
            kv=kv, eager=eager, budget=total,
            device=device, graphs=graphs, mask_token_id=mask_token_id, block_length=block_length, tokenizer=tokenizer,
            eos=eos, full_sequence=full_sequence,
            thresholds=[options.percent("--thresholds", part) for part in thresholds.split(",")],
            temperature=temperature, prompts=prompts or [], yields=yields, max_batch=max_batch,
            seed=seed, out=output, force=force, _page=page, _samples=samples, _command=options.command(),
            _warn=screen.warn, _ready=lambda: stack.enter_context(bar),
            _progress=lambda what, share: bar.update(round(share * total), note=what, left=(1 - share) * total),
        )  # fmt: skip
    written = [str(path) for path in (output, page, samples) if path is not None]
    if found.steps is None:
        assert roofline is not None
        assert model is not None
        _show_derived(found.profile, roofline, model, tp, written, json)
    else:
        _show_fitted(found, from_log, client, written, json)


def _show_fitted(found: "Profiled", from_log: Path | None, client: Path | None, written: list[str], json: bool) -> None:
    """Exit with NOT_VALID if the profile has doubts."""
    from ..report.profile_words import fitted_lines

    profile, doubts = found.profile, found.doubts
    if json:
        print_json({**found.to_json(), "doubts": doubts, "written": written}, indent=2)
    else:
        show(f"{profile.description}: {profile.verdict}")
        for line in fitted_lines(profile):
            show("  " + line)
        if from_log is not None:
            measured = f"{profile.frontend * 1e3:.3g} ms between a client and the engine, by {client}"
            show(f"  front end {'not measured: 0 (--client)' if client is None else measured}")
        for line in doubts:
            show("Not valid: " + line)
        show(f"Wrote {', '.join(written)}")
    if doubts:
        raise typer.Exit(NOT_VALID)


def _show_derived(profile: "Profile", gpu: str, model: str, tp: int, written: list[str], json: bool) -> None:
    from ..profiler import hardware, models
    from ..report.profile_words import derived_facts, derived_lines

    facts = derived_facts(profile, hardware.gpu(gpu), models.model(model), tp)
    if json:
        print_json({**facts, "written": written[0] if written else None}, indent=2)
        return
    show(f"{profile.description}: {profile.verdict}")
    for line in derived_lines(profile, facts):
        show("  " + line)
    for path in written:
        show(f"Wrote {path}")


def profiles_command(
    json: options.AsJson = False,
) -> None:
    """List the shipped profiles.

    dsim profiles
    dsim profiles --json
    """
    from ..profiler.known import default_said
    from ..profiler.profile import load, shipped

    held = shipped()
    if json:
        print_json(held, indent=2)
        return
    width = max(map(len, held), default=0)
    for name, description in held.items():
        show(f"{name:{width}}  {description}; {default_said(load(name))}")
