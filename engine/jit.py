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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import EnumType
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit

from .code_cache import is_private, undisturbed
from .errors import PolicyError
from .garbage import uncollected
from .numba_parts import (
    CALLED_BACK,
    JIT,
    Linked,
    Rule,
    cache_folder,
    caching_in,
    compile_for,
    keep,
    settings,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

MONTH = 30 * 86400  # s
HERE = Path(__file__).parent


def rule(function: F) -> F:
    """Compile a function on first call; shipped rules' code stays on disk."""
    if JIT:
        return Rule(function, _dispatcher)  # type: ignore[return-value]
    function.is_rule = True  # type: ignore[attr-defined]
    return function


def _dispatcher(function: Any) -> Any:
    called = {name: value.dispatcher for name, value in _globals(function).items() if isinstance(value, Rule)}
    return _compiled(_copy(function, called), _sources() if is_ours(function) else "")


def inlined(function: F) -> F:
    """A rule inlined at its calls, so that it can return records."""
    _INLINED.add(function.__code__)  # type: ignore[attr-defined]
    return rule(function)


_INLINED: set[types.CodeType] = set()


def bind(
    function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]],
    on_new: Callable[[], None] = lambda: None, kinds: str = "", nogil: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """A compiled copy of a rule and the rules it calls, with answers in place of placeholders.

    on_new: called if it is not on disk and takes seconds. kinds: its arguments' types, if they vary. nogil: other
    threads go on while it runs.
    """
    if not JIT:
        return in_python(function, answers)
    key = _key(function, answers, kinds)
    if is_kept(function, answers, kinds):
        # Callees are bound only if the code on disk is damaged.
        made = _copy(function, {})
        return _compiled(
            made, key, False, lambda: made.__globals__.update(_answered(function, answers, compiled=True)), nogil
        )
    _forget_old(_home())
    on_new()
    return _compiled(_with(function, answers, compiled=True), key, counted=False, nogil=nogil)


def _key(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> str:
    h = hashlib.sha256(f"{_sources()} {kinds}".encode())
    for placeholder in sorted(answers, key=_name):
        h.update(f"{_name(placeholder)}={_identity(answers[placeholder], set())}\n".encode())
    return f"{_name(function)}-{h.hexdigest()[:16]}"


def in_python(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """The copy of `bind` in Python: ready at once, a hundred times slower."""
    made = _with(function, answers, compiled=False)

    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # some numbers wrap on purpose
            return made(*arguments)

    return call


def is_kept(function: Any, answers: Mapping[Any, Callable[..., Any]], kinds: str) -> bool:
    """Whether the code of `bind` is on disk; marks it as used."""
    folder, found = _home() / _key(function, answers, kinds), False
    with suppress(OSError):  # removed meanwhile, or read-only
        # An interrupted compilation leaves no index.
        found = next(folder.rglob("*.nbi"), None) is not None
        if found:
            folder.touch()
    return found


def _with(function: Callable[..., Any], answers: Mapping[Any, Callable[..., Any]], compiled: bool) -> Any:
    return _copy(function, _answered(function, answers, compiled))


def _answered(function: Any, answers: Mapping[Any, Callable[..., Any]], compiled: bool) -> dict[str, Any]:
    return _called(function, {id(placeholder): answer for placeholder, answer in answers.items()}, {}, compiled)


def _bound(function: Any, answers: Mapping[int, Any], made: dict[int, Any], compiled: bool) -> Any:
    """A rule's copy for other rules, shared by policies with the same callees.

    Compiled without Python wrappers, which take most of the time.
    """
    if id(function) not in made:
        reaches = any(id(each) in answers for each in called_by([function], {}))
        made[id(function)] = None if reaches else function  # None: in progress
        called = _called(function, answers, made, compiled)
        key = compiled, function, tuple(called.items())
        if key not in _INNER:
            made_copy, ours = _copy(function, called), is_ours(function)
            _INNER[key] = _inner(made_copy, ours) if compiled else made_copy if ours else _strict(made_copy)
        made[id(function)] = _INNER[key]
    if made[id(function)] is None:
        raise PolicyError(
            f"rule {_name(function)} calls itself through the answers to its questions: expected no cycle"
        )
    return made[id(function)]


_INNER: dict[Any, Any] = {}  # by object: an id may be reused


def _called(function: Any, answers: Mapping[int, Any], made: dict[int, Any], compiled: bool) -> dict[str, Any]:
    called = _globals(getattr(function, "py_func", function))
    rules = {
        name: _bound(answers.get(id(value), value), answers, made, compiled)
        for name, value in called.items()
        if id(value) in answers or is_rule(value)
    }
    if not compiled:
        rules |= {name: value.in_python for name, value in called.items() if hasattr(value, "in_python")}
    return rules


def _copy(function: Any, called: Mapping[str, Any]) -> Any:
    plain = getattr(function, "py_func", function)
    copied = types.FunctionType(
        plain.__code__, {**plain.__globals__, **called}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    # Disk code is loaded by module name; users' files may not be importable.
    copied.__module__ = plain.__module__ if is_ours(plain) else __name__
    copied.__qualname__ = plain.__qualname__
    return copied


def copied(function: Any, like: Any, **replaced: Any) -> Any:
    """A rule's copy with other globals, of the module and name of `like`."""
    plain, like = getattr(function, "py_func", function), getattr(like, "py_func", like)
    made = types.FunctionType(
        plain.__code__, {**plain.__globals__, **replaced}, like.__name__, plain.__defaults__, plain.__closure__
    )
    made.__module__, made.__qualname__ = like.__module__, like.__qualname__
    return rule(made)


def _strict(function: F) -> F:
    """A rule from outside in Python: dividing by zero is an error."""

    @wraps(function)
    def called(*arguments: Any) -> Any:
        with np.errstate(divide="raise", invalid="raise"):
            return function(*arguments)

    return called  # type: ignore[return-value]


def called_by(rules: Iterable[Any], answers: Mapping[Any, Any]) -> list[Any]:
    """All rules that these call, directly or not; placeholders are followed to their answers."""
    by_id = {id(placeholder): answer for placeholder, answer in answers.items()}
    found: dict[int, Any] = {}
    waiting = list(rules)
    while waiting:
        function = waiting.pop()
        for value in _globals(getattr(function, "py_func", function)).values():
            if is_rule(value) and id(value) not in found:
                found[id(value)] = value
                waiting.append(by_id.get(id(value), value))
    return list(found.values())


def fields_written(function: Any) -> set[str]:
    """Fields and names outside it that a rule writes, as `record.last = 3` or by `global`."""
    code = getattr(function, "py_func", function).__code__
    lines = list(dis.get_instructions(code))
    written = {i.argval for i in lines if i.opname in ("STORE_ATTR", "STORE_GLOBAL")}
    for index, line in itertools.pairwise(lines):  # `fields["last"] = 3`
        if (index.opname, line.opname) == ("LOAD_CONST", "STORE_SUBSCR") and isinstance(index.argval, str):
            written.add(index.argval)
    return written


@cache
def parameters(function: Any) -> list[str]:
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


def wrong_parameters(answer: Any, wanted: list[str]) -> str:
    """The answer's parameters and those expected, if they are more or fewer; else empty."""
    given = parameters(answer)
    if len(wanted) == len(given):
        return ""
    return f"{_name(answer)}({', '.join(given)}), expected {len(wanted)}: {', '.join(wanted)}"


def _globals(plain: Any) -> dict[str, Any]:
    names = _names(plain.__code__)
    return {name: plain.__globals__[name] for name in sorted(names) if name in plain.__globals__}


def _inner(function: F, ours: bool) -> F:
    if function.__code__ in _INLINED:  # type: ignore[attr-defined]
        return njit(inline="always")(function)  # type: ignore[no-any-return]
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": Linked}
    model = "numpy" if ours else "python"  # a rule from outside must not divide by zero or read past an end in silence
    made = njit(error_model=model, boundscheck=not ours, _nrt=False, forceinline=True, **options)(function)
    compiled = made.compile
    # Else numba compiles again for each constant argument.
    made.compile = lambda arguments: compiled(tuple(map(numba.types.unliteral, arguments)))
    return made  # type: ignore[no-any-return]


def entry(function: Any, *arguments: Any) -> Any:
    """A rule's machine code for these arguments' types; numba's own type check outlasts short calls."""
    return compile_for(function, arguments) if JIT else function


@contextmanager
def _compiling(folder: str) -> Iterator[None]:
    """Compile without the garbage collector, which takes a fifth of the time; one process per folder at a time."""
    with ExitStack() as stack:
        if folder and fcntl is not None:
            with suppress(OSError):  # no file locks: each process compiles
                Path(folder).mkdir(parents=True, exist_ok=True)
                held = stack.enter_context(open(Path(folder) / "lock", "a"))
                fcntl.flock(held, fcntl.LOCK_EX)
        stack.enter_context(uncollected())
        yield


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return _with(function, {}, compiled=False)  # type: ignore[no-any-return]


def outer(function: F) -> F:
    if JIT:
        return rule(function)
    made = cache(lambda: in_python(function, {}))  # later: its callees may not be defined yet
    return lambda *arguments: made()(*arguments)  # type: ignore[return-value]


def is_rule(value: Any) -> bool:
    """Whether a function was made by `rule`."""
    return hasattr(value, "py_func") or hasattr(value, "is_rule")


def is_ours(function: Any) -> bool:
    """Whether a rule is shipped."""
    plain = getattr(function, "py_func", function)
    return bool(plain.__module__.startswith(f"{__package__}."))


def _name(function: Any) -> str:
    return str(getattr(function, "py_func", function).__name__)


def _compiled(
    function: F, key: str, counted: bool = True, before: Callable[[], object] = lambda: None, nogil: bool = False
) -> F:  # fmt: skip
    """A dispatcher with its code in folder `key`; before: called before it compiles."""
    folder = str(_home() / key) if key else ""
    # Rules of a replica allocate nothing.
    options = {} if counted else {"_nrt": False}
    model = "numpy" if folder else "python"  # rules from outside have no folder
    with caching_in(folder):
        made = njit(error_model=model, boundscheck=not folder, nogil=nogil, **options)(function)
        if not folder or not keep(made, function, counted, before):
            before()
    # Shipped rules share a folder and call each other: a lock would block itself.
    made.compile = undisturbed(_compiling("" if counted else folder)(made.compile), CALLED_BACK)
    return made  # type: ignore[no-any-return]


def uncompiled(error: Exception, answers: Iterable[Any]) -> str:
    """Which rule from outside failed to compile, and the first line of why."""
    others = {_name(each) for each in (*answers, *called_by(answers, {})) if not is_ours(each)}
    called = [name for name in re.findall(r"CPUDispatcher\(<function (\w+) at", str(error)) if name in others]
    which = f"rule {called[0]}" if called else ", ".join(sorted(others)) or "a rule"
    return f"{which} cannot be compiled: {_why(error)}"


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


def _identity(value: Any, seen: set[int]) -> str:
    """A rule's identity: code, constants, values of globals."""
    plain = getattr(value, "py_func", value)
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


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


@cache
def _home() -> Path:
    """A private folder for compiled code: in NUMBA_CACHE_DIR, the user's cache, or temporary."""
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


_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def _forget_old(home: Path) -> None:
    with suppress(OSError):
        for folder in home.iterdir():
            if folder.stat().st_mtime < home.stat().st_mtime - MONTH:
                shutil.rmtree(folder, ignore_errors=True)
