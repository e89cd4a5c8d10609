"""Code from outside: an object of a user's Python file, such as a policy or router."""

import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .allowed_code import AllowedCode, check_allowed
from .errors import PolicyError, cut, quoted

NAMED = "dsim_policy_"  # begins the name of a user's module


def is_file(name: str) -> bool:
    """Whether a name is `path/to/file.py:NAME`."""
    return ".py:" in name


def from_file(name: str, kinds: type | tuple[type, ...], plural: str, asker: str, allow_code: AllowedCode) -> Any:
    """The object named by `path/to/file.py:NAME`.

    kinds: errors list the file's objects or subclasses of these, called `plural`. asker: begins errors. CodeError
    unless `allow_code` has the file; PolicyError if it cannot be read or run, or lacks NAME.
    """
    path, attribute = name.rsplit(":", 1)
    check_allowed(path, allow_code, asker)
    try:
        stamp = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise PolicyError(f"{asker}: {path} cannot be read: {error.strerror}") from None
    try:
        module = _module(str(Path(path).absolute()), stamp)
    except (Exception, SystemExit) as error:  # a file may raise anything
        reason = f"{type(error).__name__}: {error}"
        reason = reason if isinstance(error, PolicyError) else cut(reason)
        raise PolicyError(f"{asker}: {path} cannot be run: {reason}") from error
    if not hasattr(module, attribute):
        names = ", ".join(n for n, value in vars(module).items() if _is_one(value, kinds, module)) or "none"
        raise PolicyError(f"{asker}: {path} holds no {cut(attribute)}; its {plural} are {names}")
    return getattr(module, attribute)


@contextmanager
def running_code_of(asker: str) -> Iterator[None]:
    """Turn errors of outside code into PolicyErrors that begin with `asker`."""
    try:
        yield
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(f"{asker}: {type(error).__name__}: {quoted(str(error))}") from error


def fault_in_code(error: BaseException | None) -> str | None:
    """The error and its place in a user's file, as a line; None if no user's code raised it."""
    fault = None
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if str(frame.f_globals.get("__name__")).startswith(NAMED):
                place = f"{frame.f_code.co_filename}:{trace.tb_lineno}: {frame.f_code.co_name}"
                fault = f"{place}: {type(error).__name__}: {cut(error)}"
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return fault


def check_names_object(name: str, asker: str, kind: str, example: str) -> None:
    """PolicyError for a file without a name, `mine.py` instead of `mine.py:POLICY`."""
    if name.endswith(".py"):
        raise PolicyError(f"{asker}: {quoted(name)} names no {kind} in the file, expected one: {cut(name)}:{example}")
    if name.partition(".py:")[2].count(":"):
        raise PolicyError(f"{asker}: {quoted(name)} has a value behind the {kind}'s name, expected fields, field=value")


def _is_one(value: Any, kinds: type | tuple[type, ...], module: types.ModuleType) -> bool:
    """Whether an object is of these kinds, or a subclass defined in the file."""
    if isinstance(value, type):
        return issubclass(value, kinds) and value.__module__ == module.__name__
    return isinstance(value, kinds)


@cache
def _module(path: str, stamp: int) -> types.ModuleType:
    """Run a file, once per version; its exceptions pass through."""
    name = f"{NAMED}{hashlib.sha256(f'{path} {stamp}'.encode()).hexdigest()[:12]}_{Path(path).stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
