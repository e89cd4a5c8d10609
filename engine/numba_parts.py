"""What numba's documentation does not promise, in one place; tried with numba 0.60 and 0.68."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
from numba.core import caching, cgutils, config
from numba.core.codegen import ll
from numba.core.compiler import Compiler, Flags
from numba.core.compiler_machinery import register_pass
from numba.core.errors import NumbaError as NumbaError
from numba.core.errors import TypingError as TypingError
from numba.core.runtime.nrt import rtsys
from numba.core.typed_passes import NativeLowering
from numba.extending import (
    intrinsic,
    make_attribute_wrapper,
    models,
    overload_attribute,
    overload_method,
    register_model,
)

from .errors import cut

JIT = not config.DISABLE_JIT
SIZE = hashlib.sha256().digest_size  # bytes


def settings() -> str:
    """What machine code depends on."""
    return f"{numba.__version__} {config.OPT} {config.BOUNDSCHECK}"


def cache_folder() -> Path | None:
    """NUMBA_CACHE_DIR, unless numba read it from a file in the current folder, possibly a stranger's."""
    return Path(config.CACHE_DIR) if config.CACHE_DIR and not Path(config._config_fname).exists() else None


# ---- rules that only rules call --------------------------------------------------------------------------------


class _LinkedLowering(NativeLowering):  # type: ignore[misc]
    """Lower a rule to code for its callers to link, without machine code of its own."""

    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.flags.no_compile = True
        super().run_pass(state)
        place_holder = [].append  # a new builtin, as rules are found by identity
        state.targetctx.insert_user_function(place_holder, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=place_holder)
        return True


register_pass(mutates_CFG=True, analysis_only=False)(_LinkedLowering)


_DEFAULTS = {name: option.default for name, option in Flags.options.items()}


class _Flags(Flags):  # type: ignore[misc]
    """Flags with fast `values`: numba compares all flags at every call it types."""

    def values(self) -> dict[str, Any]:
        return _DEFAULTS | self._values


class Linked(Compiler):  # type: ignore[misc]
    """Compiles rules that only rules call; they are optimised once, where linked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags = _Flags(self.state.flags)

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = library = state.targetctx.codegen().create_library(state.func_id.func_qualname)
        library._optimize_final_module = lambda: None
        library._finalize_final_module = lambda: _finalize_unoptimised(library)
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (_LinkedLowering, label) if kind is NativeLowering else (kind, label) for kind, label in pipeline.passes
            ]
        return pipelines


def _finalize_unoptimised(library: Any) -> None:
    library._finalize_dynamic_globals()
    library._finalized = True


# ---- a value that rules see only in part -----------------------------------------------------------------------


class ViewType(numba.types.Type):  # type: ignore[misc]
    """Holds a replica's and its policy's state; rules see `record` and what `shows` and `offers` name."""

    def __init__(self, replica: Any, policy: Any) -> None:
        self.replica, self.policy = replica, policy
        self.place = policy.fields.index("record")
        super().__init__(f"View({replica}, {policy})")


@register_model(ViewType)
class _ViewModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: ViewType) -> None:
        record = kind.policy.types[kind.place]
        super().__init__(manager, kind, [("replica", kind.replica), ("policy", kind.policy), ("record", record)])


# Not by `shows`: numba takes writes to an array of an inlined attribute for dead code.
make_attribute_wrapper(ViewType, "record", "record")


def shows(name: str, read: Callable[[Any], Any]) -> None:
    """Have rules read `view.name`."""
    overload_attribute(ViewType, name, inline="always")(lambda view: _bare(read))


def offers(name: str, call: Callable[..., Any]) -> None:
    """Have rules call `view.name(i)`."""
    overload_method(ViewType, name, inline="always")(lambda view, i: _bare(call))


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without annotations, which numba compares with a typing function's."""
    function.__annotations__ = {}
    return function


def _either(in_python: Callable[..., Any], typing: Callable[..., Any]) -> Any:
    """An intrinsic, and what stands for it in Python."""
    if not JIT:
        return in_python
    primitive = intrinsic(typing)
    primitive.in_python = in_python
    return primitive


def making_views(in_python: Callable[[Any, Any], Any]) -> Any:
    """A function from a replica's and its policy's state to their view."""

    def typing(_context: Any, replica: Any, policy: Any) -> Any:
        kind = ViewType(replica, policy)

        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            view = cgutils.create_struct_proxy(kind)(context, builder)
            view.replica, view.policy = arguments
            view.record = builder.extract_value(view.policy, kind.place)
            return view._getvalue()

        return kind(replica, policy), make

    return _either(in_python, typing)


def opening_views(in_python: Callable[[Any], Any]) -> Any:
    """A function from a view to the replica's and its policy's state."""

    def typing(_context: Any, view: Any) -> Any:
        pair = numba.types.Tuple((view.replica, view.policy))

        def take(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            members = cgutils.create_struct_proxy(view)(context, builder, value=arguments[0])
            return context.make_tuple(builder, pair, [members.replica, members.policy])

        return pair(view), take

    return _either(in_python, typing)


def making_read_only(in_python: Callable[[Any], Any]) -> Any:
    """A function from an array to the same memory, which rules cannot write to."""

    def typing(_context: Any, array: Any) -> Any:
        return array.copy(readonly=True)(array), lambda context, builder, signature, arguments: arguments[0]

    return _either(in_python, typing)


def expecting(error: type[Exception], text: str) -> Any:
    """A check of a condition and two numbers: raises `text` with the numbers, compiled code without them."""

    def in_python(holds: bool, value: Any, limit: Any) -> None:
        if not holds:
            raise error(text.format(f" {cut(value)}", f" {cut(limit)}"))

    def typing(_context: Any, holds: Any, value: Any, limit: Any) -> Any:
        def check(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.if_then(builder.not_(context.cast(builder, arguments[0], holds, numba.types.boolean))):
                context.call_conv.return_user_exc(builder, error, (text.format("", ""),))
            return context.get_dummy_value()

        return numba.types.none(holds, value, limit), check

    return _either(in_python, typing)


# ---- states side by side ---------------------------------------------------------------------------------------

STATE_BYTES = 8192  # for the addresses and shapes of a replica's arrays


def states(count: int) -> Any:
    """Room for `count` replicas' states, for `save` and `saved`; holds no references."""
    return np.zeros(count * STATE_BYTES, np.uint8) if JIT else [None] * count


if JIT:

    def _pointer(context: Any, builder: Any, kind: Any, room: Any, index: Any, array: Any) -> Any:
        size = context.get_abi_sizeof(context.get_value_type(kind))
        if size > STATE_BYTES:
            raise TypingError(f"a state takes {size} bytes, expected at most {STATE_BYTES}")
        first = context.make_array(room)(context, builder, array).data
        place = builder.gep(first, [builder.mul(index, index.type(STATE_BYTES))])
        return builder.bitcast(place, context.get_value_type(kind).as_pointer())

    @intrinsic
    def _save(_context: Any, room: Any, index: Any, state: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array, place, value = arguments
            builder.store(value, _pointer(context, builder, state, room, place, array))
            return context.get_dummy_value()

        return numba.types.none(room, numba.types.int64, state), write

    @intrinsic
    def _saved(_context: Any, room: Any, index: Any, like: Any) -> Any:
        """The state at a place, with the type of `like`."""

        def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array, place, _ = arguments
            return builder.load(_pointer(context, builder, like, room, place, array))

        return like(room, numba.types.int64, like), read

    save: Any = _save
    saved: Any = _saved
else:
    save = list[Any].__setitem__
    saved = lambda room, index, like: room[index]  # noqa: E731


# ---- compiled code on disk -------------------------------------------------------------------------------------


def keep(entry: Any, function: Callable[..., Any], folder: Path, allocates: bool, before: Callable[[], object]) -> None:
    """Keep a dispatcher's code in a folder, which exists; before: called before it compiles."""
    elsewhere, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        entry._cache = _Cache(function)
    finally:
        config.CACHE_DIR = elsewhere
    entry._cache.allocates, entry._cache.before = allocates, before


class _Names(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Only Python calls the code: of its LLVM module the names are enough."""

    _locator_classes: ClassVar[list[Any]] = caching.CompileResultCacheImpl._locator_classes[:1]  # type: ignore[misc]

    def reduce(self, data: Any) -> Any:
        (name, kind, (code, _)), *fields = super().reduce(data)
        names = [f.name for f in data.library.get_defined_functions()]
        only_names = ll.parse_assembly("\n".join(f'define void @"{function}"() {{ ret void }}' for function in names))
        return (name, kind, (code, only_names.as_bitcode())), *fields


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Unreadable code is compiled again, unwritable code by the next process."""

    _impl_class = _Names
    allocates: bool
    before: Callable[[], object]

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Stored code needs only numba's runtime; numba's method loads every compilable function, half a second.
        if self.allocates:
            rtsys.initialize(target_context)
        with suppress(Exception):  # a damaged file may raise anything
            if (overload := self._load_overload(sig, target_context)) is not None:
                return overload
        self.before()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # disk full or folder gone
            super().save_overload(sig, data)


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Files with a hash at the end: a flipped bit in machine code crashes or gives wrong results."""

    def _load_index(self) -> Any:
        with suppress(Exception):
            return super()._load_index()
        return {}

    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)
        return data + hashlib.sha256(data).digest()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-SIZE]).digest() != data[-SIZE:]:
            raise OSError(f"{name} is damaged")  # handled as missing
        return super()._load_data(name)  # unpickling ignores the hash
