"""What numba's documentation does not promise, in one place; tried with numba 0.60 and 0.68."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import caching, config
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.errors import NumbaError as NumbaError
from numba.core.errors import TypingError as TypingError
from numba.core.runtime.nrt import rtsys
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic

JIT = not config.DISABLE_JIT
SETTINGS = f"{numba.__version__} {config.OPT} {config.BOUNDSCHECK}"  # that machine code depends on


def cache_folder() -> Path | None:
    """NUMBA_CACHE_DIR, unless numba read it from a file in the current folder, possibly a stranger's."""
    if config.CACHE_DIR and not Path(config._config_fname).exists():
        return Path(config.CACHE_DIR)
    return None


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


class Linked(Compiler):  # type: ignore[misc]
    """Compiles rules that only rules call; they are optimised once, where linked."""

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


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Unreadable code is compiled again, unwritable code by the next process."""

    allocates: bool
    before: Callable[[], object]

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
        with suppress(Exception):  # disk full, folder gone, or a damaged index
            super().save_overload(sig, data)
