"""Compile rules once and keep what was compiled: the cache's key is the text of every rule in this folder.

A rule is a plain function over arrays. `rule` compiles it when it is first called; with NUMBA_DISABLE_JIT=1 it stays
plain Python, with the same results. `bind` makes a copy of a rule in which placeholders stand for other rules: so a
policy's answers become part of the one loop that serves it; `in_python` makes that copy uncompiled, for short runs.
Compiled code is kept on disk in a folder named by a hash of the sources it was made from, so that an edit never meets
yesterday's code, and two processes may share it.
"""

import dis
import gc
import hashlib
import itertools
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import EnumType
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit
from numba.extending import intrinsic

from .code_cache import is_private, undisturbed
from .errors import PolicyError
from .numba_parts import (
    CALLED_BACK,
    JIT,
    Linked,
    TypingError,
    cache_folder,
    caching_in,
    compile_for,
    keep,
    settings,
)

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

MONTH = 30 * 86400  # s
HERE = Path(__file__).parent


def rule(function: F) -> F:
    """Compile a function when it is first called. Rules of this folder are kept on disk, others with their policy."""
    made = _compiled(function, _sources() if is_ours(function) else "")
    if not JIT:
        function.is_rule = True  # type: ignore[attr-defined]
    return made


def inlined(function: F) -> F:
    """A rule whose body stands where it is called: it may return records, which compiled functions cannot."""
    _INLINED.add(function.__code__)  # type: ignore[attr-defined]
    return rule(function)


_INLINED: set[types.CodeType] = set()


def bind(
    function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]],
    on_new: Callable[[], None] = lambda: None, kinds: str = "",
) -> Callable[..., Any]:  # fmt: skip
    """A compiled copy of a rule, in which placeholders stand for these rules, in all that it calls as well.

    on_new: called where nothing of it is on disk yet, so that its first call will take seconds. kinds: of what it is
    called with, as far as they differ.
    """
    if not JIT:
        return in_python(function, answers)
    if not is_kept(function, answers, kinds):
        _forget_old(_home())
        on_new()
    return _compiled(_with(function, answers, compiled=True), _key(function, answers, kinds), counted=False)


def _key(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> str:
    h = hashlib.sha256(f"{_sources()} {kinds}".encode())
    for placeholder in sorted(answers, key=_name):
        h.update(f"{_name(placeholder)}={_identity(answers[placeholder], set())}\n".encode())
    return f"{_name(function)}-{h.hexdigest()[:16]}"


def in_python(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """What `bind` makes, as plain Python: at once, and a hundred times as slow."""
    made = _with(function, answers, compiled=False)

    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # compiled code warns of nothing: some numbers wrap on purpose
            return made(*arguments)

    return call


def is_kept(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> bool:
    """Whether what `bind` would compile is on disk, which then is in use and not to be forgotten."""
    folder, found = _home() / _key(function, answers, kinds), False
    with suppress(OSError):  # another process may remove it meanwhile, or nothing may be written
        # A folder without an index is what an interrupted compilation leaves.
        found = next(folder.rglob("*.nbi"), None) is not None
        if found:
            folder.touch()
    return found


def _with(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]], compiled: bool) -> Any:
    """A copy of a rule in which placeholders stand for these rules, in all that it calls as well."""
    by_id = {id(placeholder): answer for placeholder, answer in answers.items()}
    return _copy(function, _called(function, by_id, {}, compiled))


def _bound(function: Any, answers: Mapping[int, Any], made: dict[int, Any], compiled: bool) -> Any:
    """The stand-in for a rule inside another: one for all policies in which all that it calls stands for the same.

    Nobody calls it from Python: it is compiled without what that takes, which is most of the time.
    """
    if id(function) not in made:
        made[id(function)] = None if _reaches(function, answers, set()) else function  # while it is made
        called = _called(function, answers, made, compiled)
        key = compiled, function, tuple(called.items())
        if key not in _INNER:
            copied = _copy(function, called)
            _INNER[key] = _inner(copied) if compiled else copied
        made[id(function)] = _INNER[key]
    if made[id(function)] is None:
        raise PolicyError(
            f"rule {_name(function)} calls itself, by way of what answers its questions: expected no circle"
        )
    return made[id(function)]


_INNER: dict[Any, Any] = {}  # by a rule and what its names stand for; themselves: an id may be another rule's later


def _called(function: Any, answers: Mapping[int, Any], made: dict[int, Any], compiled: bool) -> dict[str, Any]:
    """The rules that a rule's names stand for, each with what is bound in its place."""
    called = _globals(getattr(function, "py_func", function))
    rules = {
        name: _bound(answers.get(id(value), value), answers, made, compiled)
        for name, value in called.items()
        if id(value) in answers or _is_rule(value)
    }
    if not compiled:
        rules |= {name: value.in_python for name, value in called.items() if hasattr(value, "in_python")}
    return rules


def _copy(function: Any, called: Mapping[str, Any]) -> Any:
    """A rule as a plain function in which these names stand for other rules."""
    plain = getattr(function, "py_func", function)
    copied = types.FunctionType(
        plain.__code__, {**plain.__globals__, **called}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    # What is kept on disk is loaded where this module is, wherever a rule from outside came from.
    copied.__module__ = plain.__module__ if is_ours(plain) else __name__
    copied.__qualname__ = plain.__qualname__
    return copied


def _reaches(function: Any, answers: Mapping[int, Any], seen: set[int]) -> bool:
    """Whether a rule calls a placeholder, itself or through others."""
    if id(function) in seen:
        return False
    seen.add(id(function))
    called = _globals(getattr(function, "py_func", function)).values()
    return any(id(v) in answers or (_is_rule(v) and _reaches(v, answers, seen)) for v in called)


def called_by(rules: Iterable[Any], answers: Mapping[Any, Any]) -> list[Any]:
    """Every rule that these rules call, directly or through others: placeholders too, followed by their answers."""
    by_id = {id(placeholder): answer for placeholder, answer in answers.items()}
    found: dict[int, Any] = {}
    waiting = list(rules)
    while waiting:
        function = waiting.pop()
        for value in _globals(getattr(function, "py_func", function)).values():
            if _is_rule(value) and id(value) not in found:
                found[id(value)] = value
                waiting.append(by_id.get(id(value), value))
    return list(found.values())


def fields_read(function: Any) -> set[str]:
    """The names of fields that a rule reads or writes, as `q.end` or as `q["end"]`."""
    found: set[str] = set()
    codes = [getattr(function, "py_func", function).__code__]
    for code in codes:
        found.update(i.argval for i in dis.get_instructions(code) if i.opname.endswith("_ATTR"))
        found.update(constant for constant in code.co_consts if isinstance(constant, str))
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _globals(plain: Any) -> dict[str, Any]:
    names = _names(plain.__code__)
    return {name: plain.__globals__[name] for name in sorted(names) if name in plain.__globals__}


def _inner(function: F) -> F:
    if function.__code__ in _INLINED:  # type: ignore[attr-defined]
        return njit(inline="always")(function)  # type: ignore[no-any-return]
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": Linked}
    made = njit(error_model="numpy", _nrt=False, forceinline=True, **options)(function)
    compiled = made.compile
    # Once for a type, where numba would for every constant: it is inlined, and the constants with it.
    made.compile = lambda arguments: compiled(tuple(map(numba.types.unliteral, arguments)))
    return made  # type: ignore[no-any-return]


def entry(function: Any, *arguments: Any) -> Any:
    """The machine code of a rule for arguments of these types, to be called with no others: they are not looked at.

    numba looks at the type of every array at every call, which takes longer than a short call itself.
    """
    return compile_for(function, arguments) if JIT else function


@contextmanager
def _compiling(folder: str) -> Iterator[None]:
    """Compile without the garbage collector, and what goes to this folder in one process at a time.

    Walking the compiler's many objects takes the collector a fifth of the time. A process that waited finds on disk
    what it waited for.
    """
    with ExitStack() as stack:
        if folder and fcntl is not None:
            with suppress(OSError):  # where files cannot be locked each compiles for itself
                Path(folder).mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(open(Path(folder) / "lock", "a")), fcntl.LOCK_EX)
        stack.enter_context(_uncollected())
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule as plain Python, and all that it calls: for a few calls, which are not worth compiling it."""
    return _with(function, {}, compiled=False)  # type: ignore[no-any-return]


def outer(function: F) -> F:
    """A rule that Python calls and no rule does."""
    if JIT:
        return rule(function)
    made = cache(lambda: in_python(function, {}))  # later: what it calls may not be defined yet
    return lambda *arguments: made()(*arguments)  # type: ignore[return-value]


def _is_rule(value: Any) -> bool:
    return hasattr(value, "py_func") or hasattr(value, "is_rule")


def is_ours(function: Any) -> bool:
    """Whether a rule is of this folder, and none from outside."""
    plain = getattr(function, "py_func", function)
    return bool(plain.__module__.startswith(f"{__package__}."))


def _name(function: Any) -> str:
    return str(getattr(function, "py_func", function).__name__)


def _compiled(function: F, key: str, counted: bool = True) -> F:
    folder = str(_home() / key) if key and JIT else ""
    # Rules of a replica allocate nothing and keep nothing alive: references need not be counted.
    options = {} if counted else {"_nrt": False}
    with caching_in(folder):
        made = njit(error_model="numpy", **options)(function)
        if folder:
            keep(made, function)
    if JIT:
        # Rules that call one another share a folder: waiting for its lock, one would wait for itself.
        made.compile = undisturbed(_compiling("" if counted else folder)(made.compile), CALLED_BACK)
    return made  # type: ignore[no-any-return]


def whole(name: str) -> Callable[[Any], int]:
    """A check, made while rules are compiled, that what answers `name` is a whole number."""

    def refusal(found: Any) -> str:
        return f"{name} is answered with {found}, expected a whole number"

    def checked(value: Any) -> int:
        if not isinstance(value, int | np.integer):
            raise TypeError(refusal(type(value).__name__))
        return int(value)

    if not JIT:
        return checked

    def of_type(_context: Any, value: Any) -> Any:
        if not isinstance(value, numba.types.Integer):
            raise TypingError(refusal(value))
        return value(value), lambda context, builder, signature, arguments: arguments[0]

    made = intrinsic(of_type)
    made.in_python = checked
    return made  # type: ignore[no-any-return]


def uncompiled(error: Exception, answers: Iterable[Any]) -> str:
    """Which rule of these answers could not be compiled, and the first line of why."""
    others: dict[str, None] = {}
    for answer in answers:
        _add_others(answer, others)
    # From the innermost call out: numba tells of it in the message, or the error has come through its frames.
    called = re.findall(r"CPUDispatcher\(<function (\w+) at", str(error))
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "compile" and hasattr(owner, "py_func"):
            called.insert(0, _name(owner))
        trace = trace.tb_next
    which = next((name for name in called if name in others), None)
    return f"{f'rule {which}' if which else ', '.join(others) or 'a rule'} cannot be compiled: {_why(error)}"


def _add_others(function: Any, found: dict[str, None]) -> None:
    """Add the names of the rules from outside that a rule reaches, its own among them."""
    if _is_rule(function) and not is_ours(function) and _name(function) not in found:
        found[_name(function)] = None
        for value in _globals(getattr(function, "py_func", function)).values():
            _add_others(value, found)


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):  # what numba raises for a record without such a field
        return f"there is no field {error}"
    # Where colorama is installed numba writes in colours.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith("Failed in ")]
    for before, line in itertools.pairwise(lines):
        if before.endswith("raised a specific error:"):
            return line.partition(": ")[2] or line
    return lines[0] if lines else type(error).__name__


@cache
def _sources() -> str:
    """A hash of all that shipped rules are made from: this folder's files, numba and its settings."""
    h = hashlib.sha256(settings().encode())
    for path in sorted(HERE.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()[:16]


def _identity(value: Any, seen: set[int]) -> str:
    """The parts of a rule: its code, its constants, and the rules and numbers that its names stand for."""
    plain = getattr(value, "py_func", value)
    if isinstance(plain, np.ndarray):  # prints less than it holds
        return f"{plain.dtype} {plain.shape} {plain.tobytes().hex()}"
    if isinstance(plain, types.ModuleType):  # what a rule takes of it may be any of it
        path = Path(getattr(plain, "__file__", None) or "")
        return f"{plain.__name__} {hashlib.sha256(path.read_bytes() if path.is_file() else b'').hexdigest()}"
    if not isinstance(plain, types.FunctionType):
        members = list(plain) if isinstance(plain, EnumType) else ""
        return f"{type(value).__name__} {getattr(value, '__name__', repr(value))} {members}"
    if is_ours(plain) and "<locals>" not in plain.__qualname__:
        return f"{plain.__module__}.{plain.__qualname__}"  # `_sources` has its text
    if id(plain) in seen:
        return plain.__qualname__
    seen.add(id(plain))
    h = hashlib.sha256()
    _add_code(h, plain.__code__)
    h.update(repr((plain.__defaults__, plain.__kwdefaults__)).encode())
    for name in sorted(_names(plain.__code__) & plain.__globals__.keys()):
        h.update(f"{name}={_identity(plain.__globals__[name], seen)}".encode())
    for cell in plain.__closure__ or ():
        h.update(_identity(cell.cell_contents, seen).encode())
    return f"{plain.__qualname__} {h.hexdigest()}"


def _add_code(h: Any, code: types.CodeType) -> None:
    h.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(h, constant)
        else:
            h.update(repr(constant).encode())


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


@cache
def _home() -> Path:
    """Where compiled code is kept: NUMBA_CACHE_DIR, the user's cache, or a folder that goes with this process.

    A folder that is not this user's own and private is passed over: compiled code is run as it is found.
    """
    candidates = [named] if (named := cache_folder()) else []
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


_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []  # removed as the process ends


def _forget_old(home: Path) -> None:
    """Remove what was compiled from sources that nobody has run for a month."""
    with suppress(OSError):
        for folder in home.iterdir():
            if folder.stat().st_mtime < home.stat().st_mtime - MONTH:
                shutil.rmtree(folder, ignore_errors=True)
