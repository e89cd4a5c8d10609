"""The prefixes of a trace's requests: names for the blocks of their prompts, as hash_ids or sessions tell them."""

from ..engine.errors import TraceError
from ..engine.prefix import Prefixes
from .trace import Trace

HASHED = 512  # tokens that a hash id stands for where block_size does not say it: Mooncake's
OF_A_SESSION = 16  # tokens that a name stands for where sessions are all that is known
COPY = "copy"  # the optional column of a request that was drawn several times: which of its copies this is

Names = list[int]


def prefixes_of(trace: Trace) -> Prefixes:
    """The beginning of each request, and who shares it: by hash_ids, or else by sessions; without both, nothing.

    A hash id names a block of the prompt together with all before it, as an engine's hash does, whether or not the
    trace has chained them already. Of sessions it is assumed that a turn's prompt begins with the whole of the turn
    before, its answer included; where it is too short for that, with the prompt of the turn before; where it is shorter
    than that, with nothing. TraceError where hash ids and lengths contradict each other.
    """
    copies = trace.extras.get(COPY) or [0] * len(trace)
    if "hash_ids" in trace.extras:
        return _by_hashes(trace, copies)
    if "session_id" in trace.extras:
        return _by_sessions(trace, copies)
    return Prefixes(1, [[]] * len(trace), [0] * len(trace))


def num_named(trace: Trace) -> int:
    """Requests of a trace of which it is known what they begin with."""
    told = trace.extras.get("hash_ids") or trace.extras.get("session_id") or []
    return sum(value is not None and value != [] for value in told)


def warning(trace: Trace, router: str, caches: bool) -> str | None:
    """A warning for a run that goes by prefixes on a trace that has few or none; None where there is nothing to say."""
    count = num_named(trace)
    if count == len(trace) or not (caches or router == "prefix"):
        return None
    who = "prefix caching is on" if caches else "the router goes by prefix"
    last = ": nothing can hit" if count == 0 else ""
    return f"{who} and {count} of {len(trace)} requests have hash_ids or a session_id{last}"


def _by_hashes(trace: Trace, copies: list[int]) -> Prefixes:
    block = _block_size(trace)
    known: dict[tuple[int, str], int] = {}
    names: list[Names] = []
    named = []
    for i, (ids, length) in enumerate(zip(trace.extras["hash_ids"], trace.input_length.tolist(), strict=True)):
        ids = ids or []
        if len(ids) > -(-length // block):
            raise TraceError(
                f"{trace.name}: request {i} has {len(ids)} hash_ids for {length} tokens, expected at most "
                f"{-(-length // block)} of blocks of {block} (a column block_size says another)"
            )
        name = -1 - copies[i]
        own = []
        for value in ids:
            name = known.setdefault((name, str(value)), len(known))
            own.append(name)
        names.append(own)
        named.append(min(length, len(ids) * block))
    return Prefixes(block, names, named)


def _block_size(trace: Trace) -> int:
    sizes = {size for size in trace.extras.get("block_size", []) if size is not None}
    if len(sizes) > 1:
        raise TraceError(f"{trace.name}: block_size is {min(sizes)} and {max(sizes)}, expected one size of hash_ids")
    return int(sizes.pop()) if sizes else HASHED


def _by_sessions(trace: Trace, copies: list[int]) -> Prefixes:
    block, fresh = OF_A_SESSION, 0
    last: dict[tuple[int, str], tuple[int, int, Names]] = {}  # session -> its latest turn
    names: list[Names] = []
    named = []
    lengths = zip(trace.input_length.tolist(), trace.output_length.tolist(), strict=True)
    for i, (session, (prompt, answer)) in enumerate(zip(trace.extras["session_id"], lengths, strict=True)):
        if session is None:
            names.append([])
            named.append(0)
            continue
        key = copies[i], str(session)
        before, answered, theirs = last.get(key, (0, 0, []))
        common = before + answered if prompt >= before + answered else before if prompt >= before else 0
        own = theirs[: common // block]
        more = -(-(prompt + answer) // block) - len(own)
        own = own + list(range(fresh, fresh + more))
        fresh += more
        last[key] = prompt, answer, own
        names.append(own)
        named.append(prompt + answer)
    return Prefixes(block, names, named)
