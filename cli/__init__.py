"""The command line: arguments, progress and printing. One file per command."""

import difflib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from .. import __version__
from ..engine.errors import DsimError, MachineError
from ..engine.outside import fault_in_code
from ..files.interrupt import INTERRUPTED, as_ctrl_c, end_interrupted
from ..files.read import cut, cut_words, fault, printable
from . import screen
from .capacity_question import CapacityQuestion
from .compare_question import CompareQuestion
from .declared import Command, Question, about, command
from .follow_question import FollowQuestion
from .import_question import ImportQuestion
from .lists import PoliciesQuestion, ProfilesQuestion
from .live_question import LiveQuestion
from .plan_question import PlanQuestion
from .profile_question import ProfileQuestion
from .replay_question import ReplayQuestion
from .serve_question import ServeQuestion
from .sweep_question import SweepQuestion
from .trace_question import ConvertQuestion, InfoQuestion, SynthQuestion
from .tune_question import TuneQuestion
from .validate_question import ValidateQuestion

# Base of Typer's usage errors; its module depends on the release.
UsageError: Any = typer.BadParameter.__mro__[1]

# Pydantic's parse errors, and what was expected.
EXPECTED = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}

PIPE_CLOSED = 141  # exit code of what SIGPIPE ends
EXTRAS = dict.fromkeys(("torch", "triton", "safetensors", "tokenizers"), "live")  # of packages
EXTRAS |= dict.fromkeys(("starlette", "uvicorn"), "serve")


class Commands(TyperGroup):
    """Typer ends without a word after an interrupt, and with 1 after a closed pipe: it sees other errors."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _unlike_typer():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _unlike_typer():
            return super().invoke(ctx)


@contextmanager
def _unlike_typer() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None
    except BrokenPipeError:
        _give_up_output()
        raise SystemExit(PIPE_CLOSED) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
QUESTIONS: dict[str, type[Question[Any]]] = {
    "replay": ReplayQuestion,
    "live": LiveQuestion,
    "serve": ServeQuestion,
    "sweep": SweepQuestion,
    "plan": PlanQuestion,
    "capacity": CapacityQuestion,
    "tune": TuneQuestion,
    "compare": CompareQuestion,
    "follow": FollowQuestion,
    "import": ImportQuestion,
    "validate": ValidateQuestion,
    "profile": ProfileQuestion,
    "policies": PoliciesQuestion,
    "profiles": ProfilesQuestion,
}
TRACES: dict[str, type[Question[Any]]] = {"info": InfoQuestion, "convert": ConvertQuestion, "synth": SynthQuestion}
traces = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for _app, _questions in ((app, QUESTIONS), (traces, TRACES)):
    for _name, _question in _questions.items():
        _help = about(_question).partition("\n\n")[0]
        _app.command(_name, cls=Command, short_help=_help)(command(_question, screen.run))
app.add_typer(traces, name="trace")


@traces.callback()
def of_traces() -> None:
    """Inspect, convert and synthesise workload traces.

    \b
    dsim trace info azure-conv
    dsim trace synth made.jsonl --rate 4 --num-requests 500
    """


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dsim {__version__}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Find the scheduler settings and the number of GPUs that meet a diffusion language model's latency targets.

    \b
    dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token
    dsim replay azure-conv --policy lmdeploy-bd32 --policy optimus --num-requests 500
    """


def main() -> None:
    """Run the command line: an error is one line; exit code 2 for a user's error, 1 for the machine's.

    With --json, standard output gets the error as JSON too (docs/reliability.md). SIGTERM and SIGHUP act like Ctrl-C:
    finished work is kept.
    """
    # For NumPy, not loaded yet: threads that wait for each other took a third of a plan's processor time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    screen.has_printed = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may not be valid text
    if sys.stderr and sys.stderr.isatty():  # for example that a policy is compiled
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dsim").setLevel(logging.INFO)
    try:
        with _unlike_typer(), as_ctrl_c(), warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # a user can do nothing about them
            try:
                code = app(prog_name="dsim", standalone_mode=False)
            except (Exception, SystemExit) as error:  # a user's code may raise anything
                if isinstance(error, DsimError) or not (message := fault_in_code(error)):
                    raise
                raise DsimError(message) from error
            print(end="", flush=True)
        if code == INTERRUPTED:  # finished work is kept and reported
            _print_error("Interrupted.", INTERRUPTED, "interrupted")
    except MachineError as error:
        _fail(str(error), 1, "machine")
    except DsimError as error:
        _fail(str(error), 2, "input")
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        line = f"{error.name} is not installed, expected the extra {extra}: pip install '.[{extra}]' in a clone of dsim"
        _fail(line, 2, "package")
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(2)
        path = getattr(error.ctx, "command_path", "dsim")
        _fail(f"{_mistake(error)} (see `{path} --help`)", 2, "usage")
    except typer.Abort:
        _print_error("Interrupted.", INTERRUPTED, "interrupted")
        end_interrupted()
    except OSError as error:
        if not _asks_json():
            _give_up_output()
        _fail(str(fault(error.filename or "the output", error)), 1, "machine")
    except MemoryError:
        _fail("there is not enough memory for this", 1, "machine")
    sys.exit(code if isinstance(code, int) else 0)


def _mistake(error: Any) -> str:
    """Option, value and expected number; else Typer's message."""
    if getattr(error, "possibilities", None):  # near misses only
        error.possibilities = difflib.get_close_matches(error.option_name, error.possibilities, cutoff=0.75)
    for failure in getattr(error.__cause__, "errors", list)():  # pydantic's
        if expected := EXPECTED.get(failure["type"]):
            return f"{max(error.param.opts, key=len)} is {cut(failure['input'], 40)}, expected {expected}"
    return str(error.format_message())


def _give_up_output() -> None:
    """Else Python reports the broken stream again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _asks_json() -> bool:
    """Even if the rest of the command line is wrong."""
    return "--json" in sys.argv[1:]


def _print_error(line: str, code: int, kind: str) -> None:
    """With --json, on standard output. kind: machine, input, package, usage ..."""
    if _asks_json():
        try:
            screen.print_json_error(line, code, kind)
        except OSError:
            _give_up_output()


def _fail(line: str, code: int, kind: str) -> NoReturn:
    line = printable(cut_words(line))
    _print_error(line, code, kind)
    with suppress(OSError):
        print(f"Error: {line}", file=sys.stderr)
    sys.exit(code)
