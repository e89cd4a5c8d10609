"""Shared prefixes of a trace's requests, from hash_ids or sessions."""

from collections.abc import Sequence

import numpy as np

from ..engine.errors import TraceError
from ..engine.prefix import Prefixes
from .trace import COPY, Trace

OF_A_SESSION = 16  # tokens of a session's block
HASHED = 512  # tokens a hash id if the trace does not say: Mooncake's

Names = list[int]


def prefixes_of(trace: Trace) -> Prefixes:
    """Name each prompt's blocks by hash_ids, else by sessions; equal names are shared.

    A name depends on the hash id and all blocks before it, as in an engine. A session's turn is assumed to begin with
    the previous prompt and answer, or if they do not fit, the previous prompt. TraceError if hash ids contradict
    lengths.
    """
    if "hash_ids" in trace.extras:
        return _by_hashes(trace, trace.extras.get(COPY) or [0] * len(trace))
    if "session_id" in trace.extras:
        return _by_sessions(trace)
    return Prefixes(1, [[]] * len(trace), [0] * len(trace))


def num_named(trace: Trace) -> int:
    """Requests with a known prefix."""
    column = trace.extras.get("hash_ids") or trace.extras.get("session_id") or []
    return sum(value is not None and value != [] for value in column)


def warning(trace: Trace, router: str, caches: bool) -> str | None:
    """If the run uses prefixes that the trace lacks."""
    count = num_named(trace)
    if count == len(trace) or not (caches or router == "prefix"):
        return None
    return f"prefixes are used and {count} of {len(trace)} requests have hash_ids or a session_id"


def _by_hashes(trace: Trace, copies: list[int]) -> Prefixes:
    block = _block_size(trace)
    lists: list[list[object]] = [ids or [] for ids in trace.extras["hash_ids"]]
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    many = np.flatnonzero(counts > -(-trace.input_length // block))
    if len(many):
        i, length = int(many[0]), int(trace.input_length[many[0]])
        raise TraceError(
            f"{trace.name}: request {i} has {counts[i]} hash_ids for {length} tokens, expected at most "
            f"{-(-length // block)} of blocks of {block} (a column block_size says another)"
        )
    num_tokens = np.minimum(trace.input_length, counts * block)
    return Prefixes(block, _names(lists, copies), num_tokens.tolist())


def _names(lists: Sequence[Sequence[object]], copies: list[int]) -> list[Names]:
    numbers: dict[tuple[int, str], int] = {}
    names: list[Names] = []
    for ids, copy in zip(lists, copies, strict=True):
        name = -1 - copy
        prefix = []
        for value in ids:
            name = numbers.setdefault((name, str(value)), len(numbers))
            prefix.append(name)
        names.append(prefix)
    return names


def _block_size(trace: Trace) -> int:
    sizes = {size for size in trace.extras.get("block_size", []) if size is not None}
    if len(sizes) > 1:
        raise TraceError(f"{trace.name}: block_size is {min(sizes)} and {max(sizes)}, expected one size of hash_ids")
    return int(max(sizes, default=HASHED))


def _by_sessions(trace: Trace) -> Prefixes:
    block, fresh = OF_A_SESSION, 0
    last: dict[str, tuple[int, int, Names]] = {}  # session -> latest turn
    names: list[Names] = []
    num_tokens = []
    for i, session in enumerate(trace.extras["session_id"]):
        names.append([])
        num_tokens.append(0)
        if session is None:
            continue
        prompt, answer = int(trace.input_length[i]), int(trace.output_length[i])
        before, answered, history = last.get(str(session), (0, 0, []))
        common = max(shared for shared in (0, before, before + answered) if shared <= prompt)
        names[i] = history[: common // block]
        num_fresh = -(-(prompt + answer) // block) - len(names[i])
        names[i] += range(fresh, fresh + num_fresh)
        fresh += num_fresh
        num_tokens[i] = prompt + answer
        last[str(session)] = prompt, answer, names[i]
    return Prefixes(block, names, num_tokens)
