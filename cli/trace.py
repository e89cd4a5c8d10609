"""dsim trace: inspect, convert and synthesise traces."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import TraceError
from ..files.write import check_file
from . import choices, options
from .help import Command, Group
from .options import option
from .screen import Screen, print_json, show

if TYPE_CHECKING:
    from ..traces import Trace

app = typer.Typer(no_args_is_help=True, cls=Group)


@app.callback()
def traces() -> None:
    """Inspect, convert and synthesise workload traces.

    dsim trace info azure-conv
    dsim trace synth made.jsonl --rate 4 --num-requests 500
    """


FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help=f"Detected from the keys by default: {', '.join(choices.TRACE_FORMATS)}."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


@app.command(cls=Command)
def info(
    trace: options.TraceName,
    as_json: options.AsJson = False,
    time_unit: options.TimeUnit = None,
    skip_bad: options.SkipBad = False,
    format: FormatOption = None,
    columns: options.Columns = None,
    only: options.Only = None,
) -> None:
    """Show a trace's rate, burstiness and lengths.

    dsim trace info azure-conv
    dsim trace info mine.csv --columns arrival=sent,input=num_in,output=num_out --json
    """
    from ..traces import describe, load
    from ..traces.words import table

    found = load(
        trace, time_unit=time_unit, skip_bad=skip_bad, format=format, columns=columns,
        only=only,
    )  # fmt: skip
    facts = describe(found)
    if as_json:
        print_json(facts, indent=2)
    else:
        show(table(facts))


@app.command(cls=Command)
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A trace in any known format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSON lines file to write.")],
    time_unit: options.TimeUnit = None,
    skip_bad: options.SkipBad = False,
    format: FormatOption = None,
    columns: options.Columns = None,
    only: options.Only = None,
    hash_ids: Annotated[
        bool,
        typer.Option("--hash-ids", help="Give each request different hash_ids, which `vllm bench serve` needs."),
    ] = False,
    force: Force = False,
) -> None:
    """Write a trace as JSON lines with Mooncake's keys and whole milliseconds.

    dsim trace convert azure-conv azure.jsonl
    dsim trace convert mine.csv mine.jsonl --skip-bad --hash-ids --force
    """
    from ..traces import load, write
    from ..traces.hashes import with_hash_ids
    from ..traces.words import dropped

    check_file(out, force=force)
    trace = load(
        source, time_unit=time_unit, skip_bad=skip_bad, format=format, columns=columns,
        only=only,
    )  # fmt: skip
    if hash_ids:
        trace = with_hash_ids(trace)
    Screen().warn(trace.notes.warnings)
    notes = trace.notes
    wrote(write(trace, out, force=force), trace, f"from {notes.num_rows:,} rows of {notes.format}{dropped(trace)}")


@app.command("synth", cls=Command)
def make(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSON lines file to write.")],
    arrival: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of: {', '.join(choices.ARRIVALS[1:])}.")
    ] = "poisson",
    rate: Annotated[float | None, option("R", "Requests per second.")] = None,
    cv: Annotated[float | None, option("C", "Coefficient of variation of the gaps.")] = None,
    lengths: Annotated[
        str,
        option(
            "L",
            f"One of: {', '.join(choices.LENGTHS)}; {choices.LENGTH_FORMS}; or a trace to draw pairs from; "
            "then ,max_tokens=N: a limit for all.",
        ),
    ] = "sharegpt",
    num_requests: Annotated[int | None, option("N", "Number of requests; 1000 unless --duration is given.")] = None,
    duration: Annotated[float | None, option("S", "Seconds of traffic to generate.")] = None,
    seed: Annotated[int, option("S", "Same seed, same trace.")] = 0,
    force: Force = False,
) -> None:
    """Generate a synthetic trace.

    dsim trace synth made.jsonl --rate 4 --num-requests 500 --lengths sharegpt
    dsim trace synth like.jsonl --rate 5.5 --arrival gamma --cv 1.1 --lengths azure-conv --duration 60
    """
    from ..traces import describe, synth, write

    check_file(out, force=force)
    if rate is None:
        raise TraceError("rate is missing, expected --rate R (req/s)")
    trace = synth(arrival, rate, cv=cv, lengths=lengths, num_requests=num_requests, duration=duration, seed=seed)
    facts = describe(trace)
    got = facts["cv"]
    burst = f"CV {got:.2f} (burstiness {got**-2:.3g})" if got else "constant gaps"
    wrote(write(trace, out, force=force), trace, f"{arrival} at {rate:.4g} req/s, {burst}, seed {seed}")


def wrote(path: Path, trace: "Trace", how: str) -> None:
    show(f"Wrote {path} ({len(trace):,} request{'' if len(trace) == 1 else 's'}, {how})")
