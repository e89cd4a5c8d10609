"""Signatures of `import dsim` functions: options are keywords; an unknown one suggests the nearest."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypedDict, TypeVar, get_type_hints

from ..engine.errors import DsimError
from ..files.read import did_you_mean
from ..results.scenario import Scenario

P = ParamSpec("P")
R = TypeVar("R")


class Unrouted(TypedDict, total=False):
    """A Scenario's fields that every function takes, with the same defaults."""

    workload: str | None
    yields: str | None
    frontend: float | None
    arrival: str
    cv: float | None
    lengths: str | None
    concurrency: int | None
    sessions: bool
    time_scale: float | None
    time_unit: str | None
    skip_bad: bool
    columns: str | None
    only: str | None
    emit: str
    eos: bool | None
    drain: bool
    missing_passes: bool
    seed: int
    allow_code: Iterable[str | Path]
    check_rules: bool


class Traffic(Unrouted, total=False):
    """With the router."""

    router: str


def real_signature(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Put Traffic's fields in place of `**traffic` in the signature, for completion and help.

    Parameters that begin with `_` are the commands' and are left out. TypeError for an unknown keyword. name: in
    `dsim`.
    """
    called_so = name or function.__name__
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name.startswith("_"):
            continue
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        own = {parameter.name for parameter in parameters}
        for name, kind in ((name, kind) for name, kind in get_type_hints(Traffic).items() if name not in own):
            default = () if name == "allow_code" else getattr(Scenario, name)
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    known = [parameter.name for parameter in parameters]

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        for option in options:
            if option not in known and not option.startswith("_"):
                raise TypeError(f"dsim.{called_so}() has no argument {option!r}{did_you_mean(option, known)}")
        try:
            return function(*args, **options)
        except DsimError as error:
            if "_command" not in options:  # from Python: options of the command line in its words, but for commands
                error.args = (re.sub(r"(dsim [a-z]+ [^;`)]*)|--([a-z][a-z-]*)", in_python, str(error)),)
            raise

    def in_python(option: re.Match[str]) -> str:
        name = option[1] or option[2].replace("-", "_")
        return f"{name}s" if f"{name}s" in known else name

    called.__name__ = called.__qualname__ = called_so
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def warn(lines: Iterable[str]) -> None:
    """At the line that called the function."""
    for line in lines:
        warnings.warn(line, stacklevel=4)  # this function, its caller, `called`
