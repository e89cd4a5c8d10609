"""`dsim profile` and `dsim profiles`: make a profile, and list the shipped ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError
from ..files.read import printable
from ..files.write import check_file
from . import options
from .measured import measure_profile
from .options import option
from .screen import Screen, print_json

if TYPE_CHECKING:
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
        option("FILE", "With --from-log: what a load generator measured meanwhile, for the front end.", "--client"),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "M",
            "What to measure: tiny, sdar-8b, a directory; with --roofline a name such as SDAR-8B, or a config.json.",
        ),
    ] = None,
    tp: Annotated[int, option("N", "GPUs of a replica (tensor parallel), with --roofline.")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Without captured graphs, with --roofline.")] = False,
    device: Annotated[str | None, option("D", "cuda or cpu, to measure on; the GPU where there is one.")] = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    eos: options.EndsAtEos = False,
    full_sequence: Annotated[
        bool,
        typer.Option("--full-sequence", help="For policies that attend both ways: no commits are logged."),
    ] = False,
    budget: Annotated[str, option("T", "About how long measuring may take: 90s, 5m.")] = "5m",
    thresholds: Annotated[str, option("X,...", "Unmasking thresholds to log commits at: 0.8,0.9.")] = "0.9",
    temperature: Annotated[float, option("X", "Of the commits that are logged.")] = 1.0,
    prompts: Annotated[
        list[str] | None, option("FILE", "Text or token ids to log commits on, or NAME=FILE; repeat.", "--prompts")
    ] = None,
    yields: Annotated[
        str | None, option("P", "A profile whose commit models are taken over: for random weights.", "--yields")
    ] = None,
    max_batch: Annotated[int | None, option("N", "Most sequences of a measured step.", "--max-batch")] = None,
    max_context: Annotated[int | None, option("N", "Longest context measured, in tokens.", "--max-context")] = None,
    seed: options.Seed = 0,
    output: Annotated[Path | None, option("FILE", "The profile file to write.", "--output", "-o")] = None,
    report: Annotated[
        Path | None, option("FILE", "The page that shows a fit; by default the profile's name with .html.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: options.AsJson = False,
) -> None:
    """Measure a profile, fit one to a log, or derive one for hardware you do not own.

    dsim profile --model tiny -o mine.json
    dsim profile --from-log steps.jsonl -o mine.json
    dsim profile --roofline H200 --model SDAR-8B -o h200.json

    Exit 1 where the fit does not believe itself; the reasons are printed.
    """
    if client is not None and from_log is None:
        raise DsimError(f"--client is {client} and --from-log is missing: expected the log of the same time")
    if roofline is not None and from_log is not None:
        raise DsimError("--roofline and --from-log are two ways to make a profile, expected one of them")
    if roofline is not None:
        _derive(roofline, model, tp, eager, yields, output, force, json)
        return
    if from_log is None and model is None:
        raise DsimError("nothing to profile: expected --model M, --from-log FILE, or --roofline GPU --model MODEL")
    if output is None:
        raise DsimError("--output is missing: a fitted profile is written to a file (-o FILE)")
    check_file(output, force=force)  # before minutes are spent
    page = report or output.with_suffix(".html")
    if page == output:
        raise DsimError(f"--report is {page}, the profile's own name, expected another")
    check_file(page, force=force)
    if from_log is not None:
        profile = _fit_log(from_log, client, output, page, force)
    else:
        assert model is not None
        profile = measure_profile(
            model, output, page, device=device, graphs=graphs, budget=budget, thresholds=thresholds,
            temperature=temperature, prompts=prompts or [], yields=yields, max_batch=max_batch,
            max_context=max_context, seed=seed, full_sequence=full_sequence,
            given=(mask_token_id, block_length), tokenizer=tokenizer, eos=eos,
            screen=Screen(),
        )  # fmt: skip
    from ..report.profile_page import doubts
    from ..report.profile_words import fitted, fitted_lines, front_end_words

    why = doubts(profile)
    if json:
        print_json({**fitted(profile), "written": [str(output), str(page)]}, indent=2)
    else:
        print(f"{profile.description}: {profile.verdict}")
        for line in fitted_lines(profile):
            print("  " + line)
        if from_log is not None:
            measured = f"{front_end_words(profile)}, by {client}"
            print(f"  front end {'not measured: 0 (--client)' if client is None else measured}")
        for line in why:
            print("Not valid: " + line)
        print(f"Wrote {output} and {page}")
    if why:
        raise typer.Exit(NOT_VALID)


def _fit_log(path: Path, client: Path | None, output: Path, page: Path, force: bool) -> "Profile":
    """Fit a step log, and the front end to a client's file, and write the profile and its page."""
    from ..device.profiled import fitted
    from ..profiler.profile import save
    from ..report.profile_page import write_page

    made, doubts = fitted(path, client, printable(output.stem))
    Screen().warn(doubts)
    save(made.profile, output, force)
    assert made.steps is not None
    write_page(page, made.profile, made.steps, made.logs, options.command())
    return made.profile


def _derive(
    roofline: str,
    model: str | None,
    tp: int,
    eager: bool,
    yields: str | None,
    output: Path | None,
    force: bool,
    json: bool,
) -> None:
    from ..device.profiled import derived
    from ..profiler import hardware, models
    from ..profiler.profile import save
    from ..report.profile_words import derived_facts, derived_lines

    if output is not None:
        check_file(output, force=force)
    name = printable(output.stem) if output else ""
    profile = derived(roofline, model, tp=tp, eager=eager, yields=yields, name=name).profile
    assert model is not None
    facts = derived_facts(profile, hardware.gpu(roofline), models.model(model), tp)
    if output is not None:
        save(profile, output, force)
    if json:
        print_json({**facts, "written": str(output) if output else None}, indent=2)
        return
    print(f"{profile.description}: {profile.verdict}")
    for line in derived_lines(profile, facts):
        print("  " + line)
    if output is not None:
        print(f"Wrote {output}")


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
        print(f"{name:{width}}  {description}; {default_said(load(name))}")
