"""Compile rules, and keep machine code on disk under a hash of the sources.

A rule is a plain function over arrays; with NUMBA_DISABLE_JIT=1 it stays Python, with the same results. `bind` copies a
rule with a policy's answers in place of placeholders, so that all compile into one loop; `in_python` makes that copy
uncompiled, for short runs.
"""

import dis
import hashlib
import inspect
import itertools
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit
from numba.extending import typeof_impl

from .errors import PolicyError
from .garbage import uncollected
from .numba_parts import JIT, SETTINGS, Linked, cache_folder, keep

try:
    import fcntl
except ImportError:  # Windows: each process compiles
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

HERE = Path(__file__).parent


class Rule:
    """A rule that is compiled on its first call: processes use few rules."""

    def __init__(self, function: Callable[..., Any], *, inlines: bool = False) -> None:
        update_wrapper(self, function)
        self.py_func, self.inlines = function, inlines

    def __call__(self, *arguments: Any) -> Any:
        return self._entry(*arguments)

    @cached_property
    def _entry(self) -> Any:
        return bind(self, {}, allocates=True)


@typeof_impl.register(Rule)
def _(rule: Rule, _context: Any) -> Any:
    """Type of a rule in a closure."""
    return numba.types.Dispatcher(_bound(rule, {}, {}, compiled=True))


def rule(function: F) -> F:
    """Compile a function on first call; its code stays on disk."""
    return Rule(function)  # type: ignore[return-value]


def inlined(function: F) -> F:
    """A rule inlined at its calls, so that it can return records."""
    return Rule(function, inlines=True)  # type: ignore[return-value]


def bind(
    function: Callable[..., Any],
    answers: Mapping[Any, Callable[..., Any]],
    on_new: Callable[[], None] = lambda: None,
    *,
    kinds: str = "",
    nogil: bool = False,
    allocates: bool = False,
) -> Callable[..., Any]:
    """A compiled copy of a rule and the rules it calls, with answers in place of placeholders.

    on_new: called if it is not on disk and takes seconds. kinds: its arguments' types, if they vary. nogil: other
    threads go on while it runs. allocates: makes arrays, which no rule of a replica does.
    """
    if not JIT:
        return in_python(function, answers)
    folder, copy = _folder(function, answers, kinds), _copy(function, {})

    @cache
    def link() -> None:
        copy.__globals__.update(_called(function, answers, {}, compiled=True))

    if not is_kept(function, answers, kinds):  # else callees are bound only if the code cannot be loaded
        on_new()
        link()
    dispatcher = njit(**_checks(function), nogil=nogil, _nrt=allocates)(copy)
    dispatcher.compile = _compiling(folder)(dispatcher.compile)
    with suppress(OSError, RuntimeError):  # not writable
        folder.mkdir(mode=0o700, exist_ok=True)
        keep(dispatcher, copy, folder, allocates, link)
    return dispatcher  # type: ignore[no-any-return]


@contextmanager
def _compiling(folder: Path) -> Iterator[None]:
    """Compile without the garbage collector, which takes a fifth of the time; one process per folder at a time."""
    with ExitStack() as stack:
        if fcntl is not None:
            with suppress(OSError):  # no file locks: each process compiles
                fcntl.flock(stack.enter_context(open(folder / "lock", "a")), fcntl.LOCK_EX)
        stack.enter_context(uncollected())
        yield


def _folder(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> Path:
    h = hashlib.sha256(f"{_sources()} {kinds} {_identity(function, set())}".encode())
    for placeholder in sorted(answers, key=_name):
        h.update(f"{_name(placeholder)}={_identity(answers[placeholder], set())}\n".encode())
    return _home() / f"{_name(function)}-{h.hexdigest()[:16]}"


def in_python(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """The copy of `bind` in Python: ready at once, a hundred times slower."""

    @cache
    def interpreted() -> Any:  # later: its callees may not be defined yet
        return _copy(function, _called(function, answers, {}, compiled=False))

    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # some numbers wrap on purpose
            return interpreted()(*arguments)

    return call


def is_kept(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> bool:
    """Whether the code of `bind` is on disk."""
    # An interrupted compilation leaves no index.
    return any(_folder(function, answers, kinds).rglob("*.nbi"))


def _bound(function: Any, answers: Mapping[Any, Any], copies: dict[Any, Any], compiled: bool) -> Any:
    """A rule's copy for other rules, shared by policies with the same callees.

    Compiled without Python wrappers, which take most of the time.
    """
    if function not in copies:
        copies[function] = None  # in progress
        if answers.keys().isdisjoint(called_by([function], {})):
            copies[function] = function
        called = _called(function, answers, copies, compiled)
        key = compiled, function, tuple(called.items())
        if key not in _INNER:
            _INNER[key] = _copy(function, called)
            if compiled:
                _INNER[key] = _inner(function, _INNER[key])
        copies[function] = _INNER[key]
    if copies[function] is None:
        raise PolicyError(
            f"rule {_name(function)} calls itself through the answers to its questions: expected no cycle"
        )
    return copies[function]


_INNER: dict[Any, Any] = {}


def _called(function: Any, answers: Mapping[Any, Any], copies: dict[Any, Any], compiled: bool) -> dict[str, Any]:
    called: dict[str, Any] = {}
    for name, value in _globals(function).items():
        if not compiled and hasattr(value, "in_python"):
            called[name] = value.in_python
        elif is_rule(value):
            called[name] = _bound(answers.get(value, value), answers, copies, compiled)
    return called


def _plain(function: Any) -> Any:
    return getattr(function, "py_func", function)


def _copy(function: Any, called: Mapping[str, Any]) -> Any:
    plain = _plain(function)
    copy = types.FunctionType(
        plain.__code__, {**plain.__globals__, **called}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    # Disk code is loaded by module name; users' files may not be importable.
    copy.__module__, copy.__qualname__ = __name__, plain.__qualname__
    return copy


def copied(function: Any, like: Any, **replaced: Any) -> Any:
    """A rule's copy with other globals, of the module and name of `like`."""
    copy, like = _copy(function, replaced), _plain(like)
    copy.__module__, copy.__name__, copy.__qualname__ = like.__module__, like.__name__, like.__qualname__
    return rule(copy)


def called_by(rules: Iterable[Any], answers: Mapping[Any, Any]) -> list[Any]:
    """All rules that these call, directly or not; placeholders are followed to their answers."""
    callees: dict[Any, None] = {}
    waiting = list(rules)
    while waiting:
        for value in _globals(waiting.pop()).values():
            if is_rule(value) and value not in callees:
                callees[value] = None
                waiting.append(answers.get(value, value))
    return list(callees)


def fields_written(function: Any) -> set[str]:
    """Fields and names outside it that a rule writes, as `record.last = 3` or by `global`."""
    lines = list(dis.get_instructions(_plain(function).__code__))
    written = {i.argval for i in lines if i.opname in ("STORE_ATTR", "STORE_GLOBAL")}
    for index, line in itertools.pairwise(lines):  # `fields["last"] = 3`
        if (index.opname, line.opname) == ("LOAD_CONST", "STORE_SUBSCR") and isinstance(index.argval, str):
            written.add(index.argval)
    return written


@cache
def parameters(function: Any) -> list[str]:
    return list(inspect.signature(_plain(function)).parameters)


def _globals(function: Any) -> dict[str, Any]:
    plain = _plain(function)
    names = {name for code in _codes(plain.__code__) for name in code.co_names}
    return {name: plain.__globals__[name] for name in sorted(names & plain.__globals__.keys())}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _checks(function: Any) -> dict[str, Any]:
    """A rule from outside must not divide by zero or read past an end in silence."""
    if is_ours(function):
        return {"error_model": "numpy"}
    return {"error_model": "python", "boundscheck": True}


def _inner(function: Any, copy: Any) -> Any:
    if function.inlines:
        return njit(inline="always")(copy)
    options = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": Linked}
    dispatcher = njit(**_checks(function), _nrt=False, **options)(copy)
    compiled = dispatcher.compile
    # Else numba compiles again for each constant argument.
    dispatcher.compile = lambda arguments: compiled(tuple(map(numba.types.unliteral, arguments)))
    return dispatcher


def entry(function: Any, *arguments: Any) -> Any:
    """A rule's machine code for these arguments' types; numba's own type check outlasts short calls."""
    return function.compile(tuple(map(numba.typeof, arguments))) if JIT else function


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule in Python."""
    return _copy(function, _called(function, {}, {}, compiled=False))  # type: ignore[no-any-return]


def is_rule(value: Any) -> bool:
    return isinstance(value, Rule)


def is_ours(function: Any) -> bool:
    """Whether a rule is shipped."""
    return bool(_plain(function).__module__.startswith(f"{__package__}."))


def _name(function: Any) -> str:
    return str(_plain(function).__name__)


def uncompiled(error: Exception, answers: Iterable[Any]) -> str:
    """Which rules from outside did not compile, and numba's first reason."""
    outside = {_name(function) for function in (*answers, *called_by(answers, {})) if not is_ours(function)}
    reason = f"there is no field {error}"
    if not isinstance(error, KeyError):  # numba's error for a missing field
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()  # with colorama numba writes in colours
        reason = next(line.strip() for line in lines if "Failed in " not in line)
    return f"{', '.join(sorted(outside))} cannot be compiled: {reason}"


@cache
def _sources() -> str:
    """A hash of what shipped rules depend on: this folder, numba, its settings."""
    h = hashlib.sha256(SETTINGS.encode())
    for path in sorted(HERE.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()[:16]


def _identity(value: Any, visited: set[Any]) -> str:
    """A rule's identity: code, defaults, values of globals and closures."""
    plain = _plain(value)
    if isinstance(plain, np.ndarray):  # repr is abbreviated
        return f"{plain.dtype} {plain.shape} {plain.tobytes().hex()}"
    if isinstance(plain, types.ModuleType):  # a rule may use any part of it
        path = Path(getattr(plain, "__file__", None) or "")
        return f"{plain.__name__} {path.read_bytes()!r}" if path.is_file() else plain.__name__
    if not isinstance(plain, types.FunctionType):
        return f"{type(value).__name__} {getattr(value, '__name__', repr(value))}"
    if is_ours(plain) and "<locals>" not in plain.__qualname__:
        return f"{plain.__module__}.{plain.__qualname__}"  # covered by `_sources`
    if plain in visited:
        return plain.__qualname__
    visited.add(plain)
    h = hashlib.sha256()
    for code in _codes(plain.__code__):
        constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
        h.update(code.co_code + repr((code.co_names, constants)).encode())
    h.update(repr((plain.__defaults__, plain.__kwdefaults__)).encode())
    cells = {str(i): cell.cell_contents for i, cell in enumerate(plain.__closure__ or ())}
    for name, used in {**_globals(plain), **cells}.items():
        h.update(f"{name}={_identity(used, visited)}".encode())
    return f"{plain.__qualname__} {h.hexdigest()}"


@cache
def _home() -> Path:
    """A private folder for compiled code, which runs when it is loaded: the user's cache, or a temporary one."""
    with suppress(OSError, RuntimeError):  # not writable, or no home
        folder = (cache_folder() or Path.home() / ".cache") / "dsim"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_private(folder):
            return folder
    return Path(_temporary().name)


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dsim-")


def is_private(folder: Path) -> bool:
    """Whether only this user (and root) can write to a folder; OSError if this user cannot."""
    status = folder.stat()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        user = Path(file.name).stat().st_uid
    return fcntl is None or (status.st_uid == user and not status.st_mode & 0o022)
