"""The command line: arguments, progress and printing. One file a command."""

import sys

import typer

from .. import __version__
from ..engine.errors import DsimError
from . import lists, metrics, profile, replay, trace

app = typer.Typer(
    help="Which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("replay")(replay.replay)
app.command("profile")(profile.profile_command)
app.add_typer(trace.app, name="trace")
app.command("policies")(lists.policies)
app.command("profiles")(profile.profiles_command)
app.command("metrics")(metrics.metrics_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"dsim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of dsim itself."""


def main() -> None:
    """Run the command line: a user's error is one line and exit code 2."""
    try:
        app()
    except DsimError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
