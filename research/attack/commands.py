"""The command line: its words, and whole commands that are given files of every kind that they read."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from unittest import mock

import typer

import dsim
from dsim import cli
from dsim.engine.errors import DsimError

from . import mutate

ROOT = Path(dsim.__file__).parent
CLIENTS = ROOT / "tests" / "comparison" / "clients"

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("replay", "T", "--policy", "chunk:8", "--slo", "ttft=1s", "--json"),
    ("replay", "T", "--rate", "2", "--num-requests", "4", "--seed", "1", "--replicas", "2", "--router", "jsq"),
    ("replay", "T", "--arrival", "gamma,cv=2", "--lengths", "fixed:8,8", "--emit", "step"),
    ("replay", "T", "--concurrency", "2", "--num-requests", "4"),
    ("trace", "info", "T", "--json"),
    ("trace", "info", "T", "--time-unit", "s"),
    ("trace", "convert", "T", "OUT", "--skip-bad", "--force"),
    ("trace", "synth", "OUT", "--rate", "2", "--arrival", "gamma,cv=1.5", "--num-requests", "20", "--force"),
    ("trace", "synth", "OUT", "--rate", "2", "--lengths", "normal:9,3", "--seed", "1", "--force"),
    ("profile", "--roofline", "h200", "--model", "SDAR-8B", "--tp", "2", "-o", "OUT", "--force"),
    ("profile", "--from-log", "T", "-o", "OUT", "--force"),
    ("compare", "RUN", "RUN", "--bound", "e2el=3%", "--json"),
    ("sweep", "T", "-o", "OUT", "--jobs", "1"),
    ("capacity", "T", "--slo", "nonsense", "--precision", "2%", "--rate", "3", "--max-replicas", "2"),
    ("tune", "T", "--trials", "2", "--space", "T", "-o", "OUT"),
    ("capacity", "T", "--slo", "p90:ttft=1s", "--rate", "3", "--max-replicas", "2", "-o", "OUT"),
    ("tune", "T", "--slo", "ttft=1s", "--policy", "optimus", "--objective", "speed", "-o", "RUN"),
    ("import", "BENCH", "--policy", "server", "--replicas", "1", "--slo", "ttft=2s", "-o", "OUT", "--force"),
    ("live", "T", "--model", "tiny", "--commits", "model", "--prompts", "source", "-o", "OUT"),
    ("live", "T", "--model", "MODEL", "--commits", "twin", "--block-length", "32", "--device", "cpu"),
    ("validate", "--model", "tiny", "--profile", "a100-sdar-8b", "--budget", "10m", "--load", "0.5", "--policy", "ar",
     "--lengths", "fixed:8,8", "--bound", "e2el=3%", "-o", "OUT"),
    ("serve", "--twin", "a100-sdar-8b", "--port", "8000", "--replicas", "2", "--speed", "2"),
    ("serve", "--model", "tiny", "--policy", "lmdeploy-bd32", "-o", "OUT"),
    ("profile", "--model", "tiny", "--budget", "1m", "--device", "cpu", "-o", "OUT"),
    ("plan", "T", "--policy", "chunk", "--slo", "ttft=1s", "--rate", "2", "--gpu-hour", "2", "-o", "OUT"),
    ("policies", "--json"), ("profiles",), ("--version",), ("--help",),
)  # fmt: skip


def command_line(work: Path, chance: Random, folder: Path) -> None:
    words = list(chance.choice(COMMANDS))
    for _ in range(chance.randint(1, 3)):
        i = chance.randrange(len(words))
        how = chance.random()
        if how < 0.6 and i:
            words[i] = chance.choice((mutate.spec(words[i], chance), chance.choice(mutate.WORDS)))
        elif how < 0.8:
            words.insert(
                i + 1, chance.choice((*mutate.WORDS, "--json", "--replicas", "--num-requests", "-o", "--help"))
            )
        else:
            del words[i]
            words = words or ["--help"]
    places = {
        "T": str(work / "trace.jsonl"), "OUT": str(folder / "out"), "RUN": str(work / "run"),
        "BENCH": str(CLIENTS / "vllm_bench.json"), "MODEL": str(ROOT / "live" / "tiny"),
    }  # fmt: skip
    _ends_well([places.get(word, word) for word in words], folder)


def _ends_well(arguments: list[str], folder: Path) -> None:
    """Run a command up to where its work begins: it ends with a line and the code that the docs say."""
    with _before_the_work():
        code, out, err = run_command(arguments, folder)
    assert code in (0, 1, 2), f"exit code {code}"
    assert "Traceback" not in err + out
    assert "Warning:" not in err or "RuntimeWarning" not in err
    if code == 2 and not (err or out.lstrip()).startswith("Usage"):  # a group of commands prints its help
        told = [line for line in err.splitlines() if not line.startswith(("Warning: ", "warning: "))]
        assert len(told) <= 4, err
        assert told[-1].startswith("Error: "), err
        assert all(len(word) <= 250 for word in err.split()), "an overlong word in a message"


# Whole commands and the files that they are given: a word in capitals is a file of that kind, or a place for one.
WITH_FILES: tuple[tuple[str, ...], ...] = (
    ("trace", "info", "TRACE"), ("trace", "info", "TRACE", "--json", "--skip-bad"),
    ("trace", "convert", "TRACE", "OUT", "--skip-bad"),
    ("trace", "synth", "OUT", "--rate", "2", "--lengths", "TRACE", "--arrival", "gamma", "--num-requests", "20"),
    ("trace", "synth", "OUT", "--rate", "2", "--lengths", "MANY", "--arrival", "constant"),
    ("trace", "synth", "OUT", "--rate", "2", "--lengths", "TRACE", "--num-requests", "20"),
    ("replay", "TRACE", "--policy", "ar", "--skip-bad", "--json"),
    ("replay", "TRACE", "--policy", "ar", "--no-drain", "--slo", "chat/95%:ttft=2s", "--json"),
    ("replay", "TRACE", "--policy", "ar", "--sessions", "--replicas", "2", "--router", "prefix", "-o", "OUT"),
    ("replay", "PARQUET", "--policy", "ar", "--router", "prefix", "--slo", "chat/95%:ttft=2s", "-o", "OUT"),
    ("trace", "info", "PARQUET", "--json"), ("trace", "convert", "PARQUET", "OUT"),
    ("replay", "TRACE", "--policy", "ar", "--arrival", "gamma,cv=2", "--num-requests", "9", "--rate", "3"),
    ("replay", "TRACE", "--policy", "ar", "--concurrency", "2", "--gpu-hour", "2", "-o", "OUT"),
    ("replay", "T", "--policy", "ar", "--profile", "PROFILE", "--slo", "ttft=1s", "-o", "OUT"),
    ("replay", "T", "--policy", "chunk:8", "--profile", "PROFILE", "--emit", "step", "--json"),
    ("import", "CLIENT", "--trace", "TRACE", "--slo", "ttft=2s", "-o", "OUT"),
    ("import", "CLIENT", "--slo", "ttft=2s", "-o", "OUT", "--json"),
    ("import", "CLIENT", "--log", "LOG", "--json"),
    ("import", "LOG", "--replicas", "2", "-o", "OUT"),
    ("compare", "RUN", "WHOLE", "-o", "OUT"), ("compare", "WHOLE", "RUN", "--json"),
    ("compare", "WHOLE", "RUN", "--profile", "PROFILE", "--bound", "e2el=3%", "-o", "OUT"),
    ("capacity", "TRACE", "--slo", "p90:ttft=1s", "--profile", "PROFILE", "--policy", "POLICY"),
    ("plan", "TRACE", "--slo", "p90:ttft=1s", "--gpu", "SHEET", "--model", "SHAPE", "--yields", "PROFILE"),
    ("plan", "TRACE", "--slo", "p90:ttft=1s", "--policy", "POLICY", "--quality-table", "QUALITY", "-o", "OUT"),
    ("tune", "TRACE", "--slo", "ttft=1s", "--space", "SPACE", "--quality-table", "QUALITY", "-o", "OUT"),
    ("sweep", "SWEEP", "-o", "OUT", "--jobs", "1"),
    ("profile", "--roofline", "SHEET", "--model", "SHAPE", "--tp", "2", "-o", "OUT"),
    ("serve", "--twin", "PROFILE", "--policy", "ar"),
    ("live", "TRACE", "--model", "tiny", "--commits", "twin", "--profile", "PROFILE", "--prompts", "PROMPTS"),
)  # fmt: skip
ENDS = {"CLIENT": (".json", ".jsonl"), "POLICY": (".toml",), "SHEET": (".toml",),
        "SHAPE": (".json",), "PROMPTS": (".jsonl", ".txt"), "PROFILE": (".json",)}  # fmt: skip


def with_files(
    work: Path, made: dict[str, Callable[[Random], bytes]], a_run: Callable[[Random, Path], Path],
    chance: Random, folder: Path,
) -> None:  # fmt: skip
    """A whole command, of whose files one is changed, and the others in a few digits at most.

    made: a file of each kind; a_run: makes a run's folder in a folder.
    """
    words = list(chance.choice(WITH_FILES))
    places = {"T": str(work / "trace.jsonl"), "OUT": str(folder / "out"), "WHOLE": str(work / "run")}
    files = [i for i, word in enumerate(words) if word in made or word == "RUN"]
    changed = chance.choice(files)
    for i in files:
        word = words[i]
        with contextlib.nullcontext() if i == changed else mock.patch.object(mutate, "GENTLE", 1.0):
            if word == "RUN":
                words[i] = str(a_run(chance, folder))
            else:
                path = folder / f"{i}{chance.choice(ENDS.get(word, ('',)))}"
                path.write_bytes(made[word](chance))
                words[i] = str(path)
    _ends_well([places.get(word, word) for word in words], folder)


def _stop(*_: Any, **__: Any) -> NoReturn:
    raise DsimError("the work begins")


# Where work begins that takes minutes, many processes, or lasts until it is stopped: module, and what of it.
WORK = (
    ("live.session", "run"), ("live.session", "open_executor"), ("planner.validation", "validate"),
    ("planner.validation", "plan_cells"), ("profiler.measure", "profile_model"), ("serve.server", "Server.run"),
    ("planner.backend", "Pool.__enter__"),
)  # fmt: skip


@contextlib.contextmanager
def _before_the_work() -> Iterator[None]:
    """Commands that search, serve or measure end where that begins: what they say before it is what is tried here."""
    with contextlib.ExitStack() as stack:
        for module, name in WORK if find_spec("torch") else ():
            place: Any = import_module(f"dsim.{module}")
            *inside, last = name.split(".")
            for part in inside:
                place = getattr(place, part)
            stack.enter_context(mock.patch.object(place, last, _stop))
        yield


def run_command(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """How a command ends in this process: its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["dsim", *arguments]),
        mock.patch("dsim.cli.app", _parser()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


@cache
def _parser() -> Any:
    """The option parser, made once: it takes longer than most commands."""
    return typer.main.get_command(cli.app)
