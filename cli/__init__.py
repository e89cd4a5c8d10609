"""The command line: arguments, progress and printing. One file a command."""

import logging
import os
import sys
from typing import Any, NoReturn

import typer

from .. import __version__
from ..engine.errors import DsimError
from . import (
    capacity,
    compare,
    importing,
    lists,
    live,
    metrics,
    profile,
    replay,
    serve,
    sweep,
    trace,
    trace_view,
    tune,
    validate,
)  # fmt: skip
from .options import INTERRUPTED

# The base of what Typer raises for a mistaken command line, wherever its release keeps it.
UsageError: Any = typer.BadParameter.__mro__[1]

LIVE = ("torch", "triton", "safetensors", "tokenizers")  # the live extra's
SERVE = ("starlette", "uvicorn")  # the serve extra's

app = typer.Typer(
    help="Which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("replay")(replay.replay)
app.command("live")(live.live_command)
app.command("serve")(serve.serve_command)
app.command("sweep")(sweep.sweep)
app.command("capacity")(capacity.capacity_command)
app.command("tune")(tune.tune_command)
app.command("compare")(compare.compare_command)
app.command("import")(importing.import_command)
app.command("validate")(validate.validate_command)
app.command("profile")(profile.profile_command)
app.add_typer(trace.app, name="trace")
app.command("trace-view")(trace_view.trace_view)
app.command("policies")(lists.policies)
app.command("profiles")(profile.profiles_command)
app.command("metrics")(metrics.metrics_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"dsim {__version__}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of dsim itself."""


def main() -> None:
    """Run the command line: a user's error is one line and exit code 2."""
    if sys.stderr.isatty():  # such as that a policy is compiled, which takes a while
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dsim").setLevel(logging.INFO)
    try:
        code = app(prog_name="dsim", standalone_mode=False)
    except DsimError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in SERVE:
            _fail(f"{error.name} is not installed, which the server needs: pip install '.[serve]' in a clone of dsim")
        if missing not in LIVE:
            raise
        _fail(f"{error.name} is not installed, which a device's runs need: pip install '.[live]' in a clone of dsim")
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        _fail(f"{error.format_message()} (see `{error.ctx.command_path if error.ctx else 'dsim'} --help`)")
    except (typer.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has gone, and Python would complain again as it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str) -> NoReturn:
    print(f"Error: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)
