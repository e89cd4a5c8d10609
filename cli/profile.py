"""`dsim profile` and `dsim profiles`: make a profile, and list the shipped ones."""

import dataclasses
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

MAX_PREFILL_TOKENS = 4096  # LMDeploy's default
NOT_VALID = 1
OVERHEAD_AT = 512  # tokens of the request whose cache overhead is shown


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
    check_file(output, force=force)  # told before minutes are spent
    beside = report or output.with_suffix(".html")
    if beside == output:
        raise DsimError(f"--report is {beside}, the profile's own name, expected another")
    check_file(beside, force=force)
    if from_log is not None:
        profile = _fit_log(from_log, client, output, beside, force)
    else:
        assert model is not None
        profile = measure_profile(
            model, output, beside, device=device, graphs=graphs, budget=budget, thresholds=thresholds,
            temperature=temperature, prompts=prompts or [], yields=yields, max_batch=max_batch,
            max_context=max_context, seed=seed, full_sequence=full_sequence,
            given=(mask_token_id, block_length), tokenizer=tokenizer, eos=eos,
            screen=Screen(),
        )  # fmt: skip
    from ..report.profile_page import doubts

    why = doubts(profile)
    if json:
        print_json({**_fitted(profile), "written": [str(output), str(beside)]}, indent=2)
    else:
        print(f"{profile.description}: {profile.verdict}")
        for line in _fitted_lines(profile):
            print("  " + line)
        if from_log is not None:
            measured = f"{profile.frontend * 1e3:.3g} ms between a client and the engine, by {client}"
            print(f"  front end {'not measured: 0 (--client)' if client is None else measured}")
        for line in why:
            print("Not valid: " + line)
        print(f"Wrote {output} and {beside}")
    if why:
        raise typer.Exit(NOT_VALID)


def _fit_log(path: Path, client: Path | None, output: Path, beside: Path, force: bool) -> "Profile":
    """Fit a step log, and the front end to a client's file beside it, and write the profile and its page."""
    from ..planner.profiled import fitted
    from ..profiler.profile import save
    from ..report.profile_page import write_page

    made, doubts = fitted(path, client, printable(output.stem))
    Screen().warn(doubts)
    save(made.profile, output, force)
    assert made.steps is not None
    write_page(beside, made.profile, made.steps, made.logs, options.command())
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
    from ..planner.profiled import derived
    from ..profiler import hardware, models
    from ..profiler import roofline as rooflines
    from ..profiler.profile import save

    if output is not None:
        check_file(output, force=force)
    name = printable(output.stem) if output else ""
    profile = derived(roofline, model, tp=tp, eager=eager, yields=yields, name=name).profile
    assert model is not None
    facts = _facts(profile, rooflines.knee(hardware.gpu(roofline), models.model(model), tp))
    if output is not None:
        save(profile, output, force)
    if json:
        print_json({**facts, "written": str(output) if output else None}, indent=2)
        return
    print(f"{profile.description}: {profile.verdict}")
    for line in _lines(profile, facts):
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


def _facts(profile: "Profile", knee: float) -> dict[str, object]:
    """The derived values, in the units of the profile."""
    from ..profiler import roofline as rooflines

    latency, memory = profile.latency, profile.memory
    rows = memory.usual_rows(profile.default_max_batch)
    pages, prefill = memory.fit(rooflines.PAGE, rows, MAX_PREFILL_TOKENS)
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
        "max_batch": rows,
        "max_prefill_tokens": prefill,
        "relative_uncertainty": profile.fit.relative_uncertainty,
        "workloads": list(profile.workloads),
    }


def _lines(profile: "Profile", facts: dict[str, object]) -> list[str]:
    from ..profiler.profile import gb

    f = {key: value for key, value in facts.items() if isinstance(value, int | float)}
    bound = "kernel launches" if facts["floor_is_launch"] else "reading the weights"
    workloads = facts["workloads"]
    shared = ", which layers with a window share" if profile.memory.window_bytes_per_token else ""
    names = ", ".join(workloads) if isinstance(workloads, list) and workloads else _no_commits(profile)
    return [
        f"knee      {f['knee_tokens']} tokens a step: reading the weights takes as long as multiplying with them",
        f"floor     {f['floor_s'] * 1e3:.2g} ms a step, set by {bound}",
        f"slope     {f['slope_s_per_token'] * 1e6:.2g} us a token beyond the knee, before attention and LM head",
        f"memory    weights take {gb(f['weight_bytes'])} of {gb(f['capacity_bytes'])}",
        f"KV pages  {f['num_pages']} of {f['page']} tokens{shared}, at a batch of {f['max_batch']} and prefills of "
        f"{f['max_prefill_tokens']} tokens",
        f"commits   {names}",
        f"trust     latencies to about ±{f['relative_uncertainty']:.0%}",
    ]


def _fitted(profile: "Profile") -> dict[str, object]:
    """The fitted values, in the units of the profile."""
    fit = profile.fit
    return {
        "name": profile.name,
        "origin": profile.origin,
        "valid": bool(fit.valid) and all(f.valid for f in profile.commit_fits),
        "doubts": [*fit.doubts, *(line for f in profile.commit_fits for line in f.doubts)],
        "latency": dataclasses.asdict(profile.latency),
        "num_points": fit.num_points,
        "held_out": None if fit.held_out is None else dataclasses.asdict(fit.held_out),
        "noise": fit.noise,
        "drift": fit.drift,
        "unidentified": list(fit.unidentified),
        "commits": [dataclasses.asdict(f) for f in profile.commit_fits],
        "canvas_laws": [dataclasses.asdict(law) for law in profile.canvas_laws],
        "frontend": profile.frontend,
        "workloads": list(profile.workloads),
    }


def _fitted_lines(profile: "Profile") -> list[str]:
    from ..profiler.canvas_law import mean_forwards

    fit, judged = profile.fit, profile.fit.held_out
    parts = [f"{y * 1e3:.3g} ms at {x:.0f}" for x, y in profile.latency.knots]
    held = (
        "none held out"
        if judged is None
        else (f"held out {judged.num_points}: median error {judged.median:.1%}, 95th percentile {judged.p95:.1%}")
    )
    noise = "unknown" if fit.noise is None else f"{fit.noise:.1%}"
    drift = "unknown" if fit.drift is None else f"{fit.drift:+.1%}"
    lines = [
        f"points    {fit.num_points} step shapes; {held}",
        f"noise     {noise} between repeats, drift {drift}",
        f"pieces    {', '.join(parts)} tokens, then {profile.latency.slope * 1e6:.3g} us a token",
    ]
    if profile.latency.launch:
        lines.append(f"floor     {profile.latency.launch * 1e3:.3g} ms a step to launch")
    if profile.latency.graph_tokens:
        lines.append(
            f"graphs    decode steps of at most {profile.latency.graph_tokens} tokens are padded to 1, 2, 4 ... 256, "
            "512, 768 ... and wait for no launch"
        )
    if fit.unidentified:
        lines.append(f"not told  {', '.join(fit.unidentified)}: these steps say nothing about them, left at 0")
    for found in profile.commit_fits:
        mean = found.predictions[0]
        lines.append(
            f"commits   {found.workload} at {found.threshold:g}: {mean.measured:.3g} tokens a step held out, "
            f"{mean.predicted:.3g} predicted ({mean.error:+.1%})"
        )
    if profile.latency.cache_overhead:
        most = max(profile.latency.cache_overhead, key=lambda part: part.row + part.token * OVERHEAD_AT)
        num = len(profile.latency.cache_overhead)
        lines.append(
            f"overhead  of {num} phases of caches; the longest is {most.cache}'s {most.phase}: "
            f"{(most.row + most.token * OVERHEAD_AT) * 1e3:.3g} ms a request of {OVERHEAD_AT} tokens"
        )
    for law in profile.canvas_laws:
        if law.histogram:
            said = f"histogram of mean {mean_forwards(law):.3g} and median {law.median:.3g}, with shares as counted"
        else:
            said = f"log-normal of median {law.median:.3g}, each {law.drift:.3g} times the one before"
        lines.append(
            f"canvases  {law.workload}: {law.least} to {law.most} steps a canvas of {law.canvas_length}, {said}; "
            f"spread {law.request_spread:.2g} between requests and {law.canvas_spread:.2g} within ({law.source})"
        )
    if not profile.commits and not profile.canvas_laws:
        lines.append(f"commits   {_no_commits(profile)}")
    return lines


def _no_commits(profile: "Profile") -> str:
    if profile.family == "full-sequence":
        return "none: policies commit fixed numbers (strategy=low_confidence_static)"
    return "none: it can run `ar` only"
