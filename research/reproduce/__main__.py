"""Published experiments next to the twin's predictions: `python -m dsim.research.reproduce`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...cli import options
from ...cli.bar import Bar
from ...cli.options import INTERRUPTED, option
from ...cli.screen import Screen, print_json, say
from ...engine.errors import DsimError


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Shipped experiments or TOML files; all shipped ones by default."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped experiments and run none.")] = False,
    published: Annotated[
        Path | None,
        option("FILE", "A CSV with published values to fill in, in the form of results.csv.", "--published"),
    ] = None,
    seeds: Annotated[int | None, option("N", "Runs of each point, instead of the experiment's own number.")] = None,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    allow_code: options.AllowCode = None,
    out: Annotated[
        Path | None,
        option("DIR", "Folder of runs, results.csv and report.html; a second call continues.", "-o", "--out"),
    ] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew: discard the folder's content.")] = False,
) -> None:
    """Run published experiments in the twin, and list published values next to predictions, with a status each.

    python -m dsim.research.reproduce focus-throughput -o runs/focus
    python -m dsim.research.reproduce --list
    """
    from ...engine.allowed_code import allowed
    from ...report.html import to_html
    from ...results.scenario import different
    from .experiment import MAX_SEEDS, read, shipped
    from .page import reproduce_page
    from .run import FILES, Reproduced, check_published, read_published, reproduce

    if list_:
        about = {name: read(name) for name in shipped()}
        if as_json:
            shown = [
                {"name": n, "title": e.title, "system": e.system, "citation": e.citation} for n, e in about.items()
            ]
            print_json(shown)
            return
        width = max(map(len, about))
        for name, e in about.items():
            print(f"{name:<{width}}  {e.title}")
        return
    if seeds is not None and not 1 <= seeds <= MAX_SEEDS:
        raise DsimError(f"--seeds is {seeds}, expected 1 to {MAX_SEEDS}")
    code = allowed(allow_code or [])
    experiments = [read(name, code) for name in different(names or list(shipped()), "experiment")]
    given = {} if published is None else read_published(published)
    check_published(experiments, given, str(published))
    screen = Screen()
    command = options.command(options.SPEED)

    def page(found: Reproduced) -> str:
        return to_html(reproduce_page(found.to_json(), command))

    with Bar(screen, "reproduce", "runs", note="starting") as bar:
        found = reproduce(
            experiments, out, published=given, seeds=seeds, jobs=jobs, backend=backend, address=address, force=force,
            page=page,
            progress=lambda done, total, name: bar.update(done, total, note=name),
        )  # fmt: skip
    data = found.to_json()
    say(lambda: reproduce_page(data, command), data, as_json)
    if found.interrupted:
        said = f"Interrupted: {found.num_run + found.num_reused} of {found.num_points} runs are done"
        goes_on = " and kept; to go on, the same command again" if out is not None else ""
        screen.alarm(said + goes_on)
    screen.wrote(out, FILES)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


if __name__ == "__main__":
    try:
        typer.run(reproduce_command)
    except DsimError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
