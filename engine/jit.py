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
import shutil
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import EnumType
from functools import cache, cached_property, update_wrapper, wraps
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit
from numba.extending import typeof_impl

from .code_cache import compiling, is_own, is_private
from .errors import PolicyError
from .numba_parts import JIT, Linked, cache_folder, keep, settings

F = TypeVar("F", bound=Callable[..., Any])

MONTH = 30 * 86400  # s
HERE = Path(__file__).parent


class Rule:
    """A rule that is compiled on its first call: processes use few rules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.py_func = function

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)

    @cached_property
    def _compiled(self) -> Any:
        return bind(self, {}, allocates=True)


@typeof_impl.register(Rule)
def _(rule: Rule, _context: Any) -> Any:
    """Type of a rule in a closure."""
    return numba.types.Dispatcher(_bound(rule, {}, {}, compiled=True))


def rule(function: F) -> F:
    """Compile a function on first call; its code stays on disk."""
    if JIT:
        return Rule(function)  # type: ignore[return-value]
    function.is_rule = True  # type: ignore[attr-defined]
    return function


def inlined(function: F) -> F:
    """A rule inlined at its calls, so that it can return records."""
    _INLINED.add(function.__code__)  # type: ignore[attr-defined]
    return rule(function)


_INLINED: set[types.CodeType] = set()


def bind(
    function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]],
    on_new: Callable[[], None] = lambda: None, kinds: str = "", nogil: bool = False, allocates: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """A compiled copy of a rule and the rules it calls, with answers in place of placeholders.

    on_new: called if it is not on disk and takes seconds. kinds: its arguments' types, if they vary. nogil: other
    threads go on while it runs. allocates: makes arrays, which no rule of a replica does.
    """
    if not JIT:
        return in_python(function, answers)
    folder, ours, copy = _folder(function, answers, kinds), is_ours(function), _copy(function, {})

    @cache
    def link() -> None:
        copy.__globals__.update(_called(function, _by_id(answers), {}, compiled=True))

    is_safe = False
    with suppress(OSError):  # not writable
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_safe = is_own(folder)
    if not (is_safe and is_kept(function, answers, kinds)):  # else callees are bound only if the code is damaged
        _forget_old(folder.parent)
        on_new()
        link()
    model = "numpy" if ours else "python"
    dispatcher = njit(error_model=model, boundscheck=not ours, nogil=nogil, _nrt=allocates)(copy)
    dispatcher.compile = compiling(folder)(dispatcher.compile)
    if is_safe:
        with suppress(RuntimeError):  # not writable meanwhile
            keep(dispatcher, copy, folder, allocates, link)
    return dispatcher  # type: ignore[no-any-return]


def _folder(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> Path:
    h = hashlib.sha256(f"{_sources()} {kinds} {_identity(function, set())}".encode())
    for placeholder in sorted(answers, key=_name):
        h.update(f"{_name(placeholder)}={_identity(answers[placeholder], set())}\n".encode())
    return _home() / f"{_name(function)}-{h.hexdigest()[:16]}"


def in_python(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """The copy of `bind` in Python: ready at once, a hundred times slower."""
    interpreted = _copy(function, _called(function, _by_id(answers), {}, compiled=False))

    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # some numbers wrap on purpose
            return interpreted(*arguments)

    return call


def is_kept(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> bool:
    """Whether the code of `bind` is on disk; marks it as used."""
    folder, stored = _folder(function, answers, kinds), False
    with suppress(OSError):  # removed meanwhile, or read-only
        # An interrupted compilation leaves no index.
        stored = next(folder.rglob("*.nbi"), None) is not None
        if stored:
            folder.touch()
    return stored


def _by_id(answers: Mapping[Any, Any]) -> dict[int, Any]:
    return {id(placeholder): answer for placeholder, answer in answers.items()}


def _bound(function: Any, answers: Mapping[int, Any], copies: dict[int, Any], compiled: bool) -> Any:
    """A rule's copy for other rules, shared by policies with the same callees.

    Compiled without Python wrappers, which take most of the time.
    """
    if id(function) not in copies:
        reaches = any(id(callee) in answers for callee in called_by([function], {}))
        copies[id(function)] = None if reaches else function  # None: in progress
        called = _called(function, answers, copies, compiled)
        key = compiled, function, tuple(called.items())
        if key not in _INNER:
            copy, ours = _copy(function, called), is_ours(function)
            _INNER[key] = _inner(copy, ours) if compiled else copy if ours else _strict(copy)
        copies[id(function)] = _INNER[key]
    if copies[id(function)] is None:
        raise PolicyError(
            f"rule {_name(function)} calls itself through the answers to its questions: expected no cycle"
        )
    return copies[id(function)]


_INNER: dict[Any, Any] = {}  # by object: an id may be reused


def _called(function: Any, answers: Mapping[int, Any], copies: dict[int, Any], compiled: bool) -> dict[str, Any]:
    called = _globals(function)
    rules = {
        name: _bound(answers.get(id(value), value), answers, copies, compiled)
        for name, value in called.items()
        if id(value) in answers or is_rule(value)
    }
    if not compiled:
        rules |= {name: value.in_python for name, value in called.items() if hasattr(value, "in_python")}
    return rules


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


def _strict(function: F) -> F:
    """A rule from outside in Python: dividing by zero is an error."""

    @wraps(function)
    def called(*arguments: Any) -> Any:
        with np.errstate(divide="raise", invalid="raise"):
            return function(*arguments)

    return called  # type: ignore[return-value]


def called_by(rules: Iterable[Any], answers: Mapping[Any, Any]) -> list[Any]:
    """All rules that these call, directly or not; placeholders are followed to their answers."""
    by_id = _by_id(answers)
    callees: dict[int, Any] = {}
    waiting = list(rules)
    while waiting:
        for value in _globals(waiting.pop()).values():
            if is_rule(value) and id(value) not in callees:
                callees[id(value)] = value
                waiting.append(by_id.get(id(value), value))
    return list(callees.values())


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


def wrong_parameters(answer: Any, expected: list[str]) -> str:
    """The answer's parameters and those expected, if they are more or fewer; else empty."""
    names = parameters(answer)
    if len(expected) == len(names):
        return ""
    return f"{_name(answer)}({', '.join(names)}), expected {len(expected)}: {', '.join(expected)}"


def _globals(function: Any) -> dict[str, Any]:
    plain = _plain(function)
    return {name: plain.__globals__[name] for name in sorted(_names(plain.__code__) & plain.__globals__.keys())}


def _inner(function: F, ours: bool) -> F:
    if function.__code__ in _INLINED:  # type: ignore[attr-defined]
        return njit(inline="always")(function)  # type: ignore[no-any-return]
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": Linked}
    model = "numpy" if ours else "python"  # a rule from outside must not divide by zero or read past an end in silence
    dispatcher = njit(error_model=model, boundscheck=not ours, _nrt=False, forceinline=True, **options)(function)
    compiled = dispatcher.compile
    # Else numba compiles again for each constant argument.
    dispatcher.compile = lambda arguments: compiled(tuple(map(numba.types.unliteral, arguments)))
    return dispatcher  # type: ignore[no-any-return]


def entry(function: Any, *arguments: Any) -> Any:
    """A rule's machine code for these arguments' types; numba's own type check outlasts short calls."""
    return function.compile(tuple(map(numba.typeof, arguments))) if JIT else function


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule in Python."""
    return _copy(function, _called(function, {}, {}, compiled=False))  # type: ignore[no-any-return]


def outer(function: F) -> F:
    """A rule that Python calls, and that makes arrays."""
    if JIT:
        return rule(function)
    interpreted = cache(lambda: in_python(function, {}))  # later: its callees may not be defined yet
    return lambda *arguments: interpreted()(*arguments)  # type: ignore[return-value]


def is_rule(value: Any) -> bool:
    """Whether a function was made by `rule`."""
    return hasattr(value, "py_func") or hasattr(value, "is_rule")


def is_ours(function: Any) -> bool:
    """Whether a rule is shipped."""
    return bool(_plain(function).__module__.startswith(f"{__package__}."))


def _name(function: Any) -> str:
    return str(_plain(function).__name__)


def uncompiled(error: Exception, answers: Iterable[Any]) -> str:
    """Which rule from outside failed to compile, and the first line of why."""
    outside = {_name(function) for function in (*answers, *called_by(answers, {})) if not is_ours(function)}
    called = [name for name in re.findall(r"CPUDispatcher\(<function (\w+) at", str(error)) if name in outside]
    label = f"rule {called[0]}" if called else ", ".join(sorted(outside)) or "a rule"
    return f"{label} cannot be compiled: {_why(error)}"


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):  # numba's error for a missing field
        return f"there is no field {error}"
    # With colorama numba writes in colours.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith("Failed in ")]
    for before, line in itertools.pairwise(lines):
        if before.endswith("raised a specific error:"):
            return line.partition(": ")[2] or line
    return lines[0] if lines else type(error).__name__


@cache
def _sources() -> str:
    """A hash of what shipped rules depend on: this folder, numba, its settings."""
    h = hashlib.sha256(settings().encode())
    for path in sorted(HERE.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()[:16]


def _identity(value: Any, visited: set[int]) -> str:
    """A rule's identity: code, constants, values of globals."""
    plain = _plain(value)
    if isinstance(plain, np.ndarray):  # repr is abbreviated
        return f"{plain.dtype} {plain.shape} {plain.tobytes().hex()}"
    if isinstance(plain, types.ModuleType):  # a rule may use any part of it
        path = Path(getattr(plain, "__file__", None) or "")
        return f"{plain.__name__} {hashlib.sha256(path.read_bytes() if path.is_file() else b'').hexdigest()}"
    if not isinstance(plain, types.FunctionType):
        members = list(plain) if isinstance(plain, EnumType) else ""
        return f"{type(value).__name__} {getattr(value, '__name__', repr(value))} {members}"
    if is_ours(plain) and "<locals>" not in plain.__qualname__:
        return f"{plain.__module__}.{plain.__qualname__}"  # covered by `_sources`
    if id(plain) in visited:
        return plain.__qualname__
    visited.add(id(plain))
    h = hashlib.sha256()
    for code in _codes(plain.__code__):
        constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
        h.update(code.co_code + repr((code.co_names, constants)).encode())
    h.update(repr((plain.__defaults__, plain.__kwdefaults__)).encode())
    for name, used in _globals(plain).items():
        h.update(f"{name}={_identity(used, visited)}".encode())
    for cell in plain.__closure__ or ():
        h.update(_identity(cell.cell_contents, visited).encode())
    return f"{plain.__qualname__} {h.hexdigest()}"


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code and that of functions in it."""
    within = (_codes(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [code, *itertools.chain.from_iterable(within)]


def _names(code: types.CodeType) -> set[str]:
    return {name for inner in _codes(code) for name in inner.co_names}


@cache
def _home() -> Path:
    """A private folder for compiled code: in NUMBA_CACHE_DIR, the user's cache, or temporary."""
    candidates = [override] if (override := cache_folder()) else []
    with suppress(RuntimeError):  # no home
        candidates.append(Path.home() / ".cache")
    for base in candidates:
        folder = base / "dsim"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if is_private(folder):
            return folder
    _PRIVATE.append(tempfile.TemporaryDirectory(prefix="dsim-"))
    return Path(_PRIVATE[0].name)


_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def _forget_old(home: Path) -> None:
    with suppress(OSError):
        for folder in home.iterdir():
            if folder.stat().st_mtime < home.stat().st_mtime - MONTH:
                shutil.rmtree(folder, ignore_errors=True)
