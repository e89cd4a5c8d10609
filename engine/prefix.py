"""Prefix caching: pages of keys and values that requests share, and that stay in the pool until it needs the room.

A page is known by all tokens up to its end (vLLM chains the hashes of its blocks, SGLang and LMDeploy keep a tree of
them). While requests hold it, it counts once among the pages held, however many they are. When the last one lets go, it
becomes idle: it may be reused, and it is free to whoever needs a page, the one idle longest first. A request's pages
come idle last one first, so that a prefix outlives what follows it.

In vLLM each group of layers with a window has pages of its own of the same tokens (windows.py), which requests share as
they share the others. A prefix is found as far as all groups have it: the layers that see all need all of its pages, a
group with a window those in sight of its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PolicyError
from .hooks import give_back, hold, leave_sight, reusable, reuse
from .jit import rule
from .part import Answers, PagedMemory, Policy
from .windows import num_left, window_groups

Ints = npt.NDArray[np.int64]

NONE = -1  # no entry

ENTRY = np.dtype(
    [
        ("key", "i8"),  # of the page: see `_key`
        ("refs", "i4"),  # sequences that hold it; 0: it is idle
        ("owner", "i4"),  # slot of the sequence that computed it, as long as that one holds it
        ("next", "i4"),  # in the chain of its bucket, or of the entries that are not in use
        ("older", "i4"), ("newer", "i4"),  # of an idle page: those that came idle before and after it
        ("group", "i4"),  # of layers: 0 sees all tokens, those from 1 on a window
    ],
    align=True,
)  # fmt: skip

COUNTS = np.dtype(
    [
        ("block", "i8"),  # tokens that a name stands for
        ("per_block", "i8"),  # pages that may end within them
        ("unused", "i8"),  # the first entry that is not in use
        ("oldest", "i8"), ("newest", "i8"),  # idle pages
        ("idle", "i8"),  # how many those are
        ("queries", "i8"), ("hits", "i8"),  # prompt tokens looked up, and of those found
    ],
    align=True,
)  # fmt: skip


class Prefixes:
    """The beginnings of a run's requests: a name for each `block` tokens, the same for the same tokens up to there.

    names: of each request, from 0 on. named [requests]: its first tokens that have one: those of the prompt, and of the
    answer where later requests repeat it. cached [requests]: prompt tokens that were found in a replica's pool when the
    request was first let in, written by the engine.
    """

    def __init__(self, block: int, names: Sequence[Sequence[int]], named: Sequence[int]) -> None:
        self.block = block
        self.offsets = np.cumsum([0, *map(len, names)], dtype=np.int64)  # where each request's names begin
        self.names = np.fromiter(chain.from_iterable(names), np.int64, int(self.offsets[-1]))
        self.named = np.array(named, np.int64)
        self.cached = np.zeros(len(named), np.int64)
        assert (self.named <= np.diff(self.offsets) * block).all(), "tokens are named that no name is given for"

    def of(self, request: int) -> Ints:
        """A request's names."""
        return self.names[self.offsets[request] : self.offsets[request + 1]]

    @property
    def num_names(self) -> int:
        """Names are below this."""
        return int(self.names.max(initial=-1)) + 1


class ToldPrefixes(Prefixes):
    """The beginnings of a server's requests, told as they come: a name for each page of a prompt's tokens.

    num_requests: that the server takes in its life. `names` is another array when it has grown.
    """

    def __init__(self, page: int, num_requests: int) -> None:
        self.block = page
        self.offsets = np.zeros(num_requests + 1, np.int64)
        self.names = np.zeros(1 << 12, np.int64)
        self.named = np.zeros(num_requests, np.int64)
        self.cached = np.zeros(num_requests, np.int64)

    @property
    def num_names(self) -> int:
        return 1 << 62

    def tell(self, request: int, tokens: npt.NDArray[np.int32]) -> None:
        """Name the full pages of the next request's prompt: each after its tokens and the name before it."""
        begin, pages = int(self.offsets[request]), len(tokens) // self.block
        while begin + pages > len(self.names):
            self.names = np.concatenate([self.names, np.zeros_like(self.names)])
        name = b""
        for i in range(pages):
            page = tokens[i * self.block : (i + 1) * self.block]
            name = blake2b(name + page.tobytes(), digest_size=8).digest()
            self.names[begin + i] = int.from_bytes(name, "little") >> 2
        self.named[request] = pages * self.block
        self.offsets[request + 1] = begin + pages


class Cache(NamedTuple):
    """A replica's pages by what they hold."""

    offsets: Any  # of Prefixes, as the next three
    names: Any
    named: Any
    cached: Any
    entries: Any  # [pages] ENTRY
    buckets: Any  # [a power of two] int32: the first entry of each chain, by the last bits of the key
    at: Any  # [1] COUNTS


def empty(num_pages: int, page: int, prefixes: Prefixes) -> Cache:
    """The cache of a pool that nobody has used."""
    per_block, room = -(-prefixes.block // page), max(1, num_pages)
    entries, at = np.zeros(room, ENTRY), np.zeros(1, COUNTS)
    entries["next"] = np.arange(1, room + 1)
    entries["next"][-1] = NONE
    at["block"], at["per_block"] = prefixes.block, per_block
    at["oldest"] = at["newest"] = NONE
    buckets = np.full(1 << (2 * room - 1).bit_length(), NONE, np.int32)
    return Cache(prefixes.offsets, prefixes.names, prefixes.named, prefixes.cached, entries, buckets, at)


@dataclass(frozen=True)
class PrefixMemory(PagedMemory):
    """A paged KV cache whose full pages may be reused by requests that begin with the same tokens."""

    prefix_caching: Annotated[
        bool, "reuse the pages of requests that begin alike (needs a trace with hash_ids or sessions)"
    ] = False

    neutral = PagedMemory.neutral | {"prefix_caching"}
    columns = (
        ("shared", "i4"),  # of the pages held, those that others may hold too: the first ones
        ("gone", "i4"),  # of the groups with a window, the first pages: they have left it, or were never taken
    )

    def check(self, policy: Policy) -> None:
        if self.prefix_caching and not policy.batching.shares_prefixes(policy):
            kinds = type(policy.batching).__name__, type(policy.granularity).__name__
            raise PolicyError(
                f"{policy.name}: prefix_caching is true, and {kinds[0]} reuses no pages of {kinds[1]}: expected false"
            )

    def answers(self, policy: Policy) -> Answers:
        if not self.prefix_caching:
            return {}
        grouped = {reusable: pages_found_by_groups, leave_sight: let_go_unseen} if policy.batching.hashes_all else {}
        return {
            reusable: pages_found, reuse: take_found, hold: share_pages, give_back: let_go, **grouped,
        }  # fmt: skip

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"hashes_all": policy.batching.hashes_all}

    def cache(self, num_pages: int, prefixes: Prefixes | None) -> Any:
        if not self.prefix_caching:
            return ()
        return empty(num_pages, self.page_size, prefixes or Prefixes(1, [], []))


def caches_prefixes(policy: Policy) -> bool:
    """Whether a policy reuses the pages of requests that begin alike."""
    return isinstance(policy.memory, PrefixMemory) and policy.memory.prefix_caching


@rule
def _key(w: Any, x: Any, request: Any, page: Any) -> Any:
    """The key of a request's page: the name of the tokens that it ends in, and its place among the pages there.

    A name stands for all tokens up to its end, and so does the key. Tokens without a name are the request's own.
    """
    at, size = x.c.at[0], int(w.f[0].page)
    if (page + 1) * size > _num_named(x, request):
        return -1 - ((int(request) << 32) + int(page))
    block = ((page + 1) * size - 1) // at.block
    before = block * at.block // size  # pages that end before the block does begin
    return int(x.c.names[x.c.offsets[request] + block]) * at.per_block + page - before


@rule
def _find(x: Any, key: Any, group: Any) -> Any:
    """The entry of a group's page, NONE where the pool does not have it."""
    at = int(x.c.buckets[(key + group) & (len(x.c.buckets) - 1)])
    while at >= 0 and (x.c.entries[at].key != key or x.c.entries[at].group != group):
        at = int(x.c.entries[at].next)
    return at


@rule
def _held(x: Any, key: Any, group: Any, slot: Any) -> Any:
    """The entry of a page that a sequence holds: its own where it computed the page, else the oldest."""
    at = int(x.c.buckets[(key + group) & (len(x.c.buckets) - 1)])
    while at >= 0:
        entry = x.c.entries[at]
        if entry.key == key and entry.group == group and entry.owner == slot:
            return at
        at = int(entry.next)
    return _find(x, key, group)


@rule
def _groups(w: Any, x: Any) -> Any:
    """Groups of layers with a window whose pages requests share: vLLM's."""
    return window_groups(w.f[0]) if x.p[0].hashes_all else 0


@rule
def _num_named(x: Any, request: Any) -> Any:
    """A request's first tokens that have a name."""
    return int(x.c.named[request]) if request < len(x.c.named) else 0


@rule
def _shareable(w: Any, x: Any, request: Any, tokens: Any) -> Any:
    """Full pages of a request's first `tokens` that the pool keeps: vLLM keeps all, the others those with a name."""
    most = int(tokens) if x.p[0].hashes_all else min(int(tokens), _num_named(x, request))
    return most // int(w.f[0].page)


@rule
def pages_found(w: Any, x: Any, request: Any, tokens: Any) -> Any:
    """Tokens at the beginning of a request, at most so many, whose pages are there; and how many of those are held."""
    num = 0
    held = 0
    most = _shareable(w, x, request, tokens)
    while num < most:
        at = _find(x, _key(w, x, request, num), 0)
        if at < 0:
            break
        if x.c.entries[at].refs > 0:
            held += 1
        num += 1
    return num * int(w.f[0].page), held


@rule
def pages_found_by_groups(w: Any, x: Any, request: Any, tokens: Any) -> Any:
    """`pages_found` in vLLM: where EAGLE drafts, the last page found is computed again; windows have their say.

    vllm/v1/core/kv_cache_coordinator.py of 0.32.0, `find_longest_cache_hit`.
    """
    size, groups, again = int(w.f[0].page), _groups(w, x), int(x.p[0].drops_page)
    if groups == 0:
        there, held = pages_found(w, x, request, tokens)
        if again > 0 and there > 0:
            there, held = pages_found(w, x, request, there - size)
        return there, held
    # With windows, EAGLE's page is looked for beyond the tokens that may be found.
    there, held = pages_found(w, x, request, tokens + again)
    last = there // size
    lacking = _last_lacking(w, x, request, last, again)
    while last > again and lacking >= 0:
        last = lacking
        lacking = _last_lacking(w, x, request, last, again)
    last = max(0, last - again)
    held = 0
    for group in range(groups + 1):
        for page in range(num_left(w.f[0], last * size) if group > 0 else 0, last):
            held += int(x.c.entries[_find(x, _key(w, x, request, page), group)].refs > 0)
    return last * size, held


@rule
def _last_lacking(w: Any, x: Any, request: Any, last: Any, again: Any) -> Any:
    """Of the `last` pages of a prefix, the latest in sight of its end that a group with a window lacks, or NONE.

    again: pages at its end that are looked up and computed again.
    """
    first = num_left(w.f[0], max(0, last - again) * int(w.f[0].page))
    for page in range(last - 1, first - 1, -1):
        for group in range(1, _groups(w, x) + 1):
            if _find(x, _key(w, x, request, page), group) < 0:
                return page
    return NONE


@rule
def take_found(w: Any, x: Any, slot: Any, tokens: Any) -> None:
    """A sequence that was let in holds the pages of its first `tokens`, which were there, beside whoever else does."""
    c, q, s, counts = w.c[0], w.q[slot], x.s[slot], x.c.at[0]
    pages = int(tokens) // int(w.f[0].page)
    s.gone = num_left(w.f[0], tokens)
    for group in range(_groups(w, x) + 1):
        for page in range(s.gone if group > 0 else 0, pages):
            if not _join(x, _find(x, _key(w, x, int(q.request), page), group)):
                c.pages_held -= 1  # it was counted with the others'
    s.shared = pages
    if w.r[q.request].num_preemptions == 0:
        counts.queries += q.prompt
        counts.hits += tokens
        if q.request < len(x.c.cached):
            x.c.cached[q.request] = tokens


@rule
def refresh_found(w: Any, x: Any, request: Any, tokens: Any) -> None:
    """Idle pages of a request's first `tokens` were looked up and put back: they are the newest, the last one first."""
    for i in range(int(tokens) // int(w.f[0].page) - 1, -1, -1):
        at = _find(x, _key(w, x, request, i), 0)
        if x.c.entries[at].refs == 0:
            _unlink(x, at)
            _link(x, at)


@rule
def count_idle(w: Any, x: Any) -> Any:
    """Pages that nobody holds and that may be reused."""
    return int(x.c.at[0].idle)


@rule
def share_pages(w: Any, x: Any, slot: Any, tokens: Any) -> None:
    """Idle pages make room for those that are held by now; and others may use those of a sequence's first `tokens`.

    A page that was computed twice is kept once by SGLang and LMDeploy, and twice by vLLM, whose requests hit the older.
    """
    c, q, s = w.c[0], w.q[slot], x.s[slot]
    while x.c.at[0].idle > 0 and c.pages_held + x.c.at[0].idle > w.f[0].num_pages:
        _evict(x)
    most = _shareable(w, x, int(q.request), tokens)
    while s.shared < most:
        key = _key(w, x, int(q.request), int(s.shared))
        at = NONE if x.p[0].hashes_all else _find(x, key, 0)
        if at < 0:
            _add(x, key, 0, slot)
        elif not _join(x, at):
            c.pages_held -= 1
        if s.shared >= s.gone:
            for group in range(1, _groups(w, x) + 1):
                _add(x, key, group, slot)
        s.shared += 1


@rule
def let_go(w: Any, x: Any, slot: Any) -> None:
    """A sequence gives its pages back: those with a name that nobody else holds come idle, the last one first."""
    c, q, s, groups = w.c[0], w.q[slot], x.s[slot], _groups(w, x)
    c.pages_held -= q.pages - s.shared + q.window_pages - groups * max(0, int(s.shared) - int(s.gone))
    for group in range(groups + 1):
        _let_go_pages(w, x, slot, group, int(s.gone) if group > 0 else 0, int(s.shared))
    s.shared = 0
    s.gone = 0
    q.pages = 0
    q.window_pages = 0


@rule
def let_go_unseen(w: Any, x: Any, slot: Any, start: Any) -> None:
    """A sequence gives back what has left the windows, the last page first."""
    c, q, s, groups = w.c[0], w.q[slot], x.s[slot], _groups(w, x)
    if groups == 0:
        return
    gone = min(num_left(w.f[0], start), int(q.pages))
    if gone <= s.gone:
        return
    c.pages_held -= groups * (gone - max(int(s.gone), min(gone, int(s.shared))))
    for group in range(1, groups + 1):
        _let_go_pages(w, x, slot, group, int(s.gone), min(gone, int(s.shared)))
    q.window_pages -= groups * (gone - s.gone)
    s.gone = gone


@rule
def _let_go_pages(w: Any, x: Any, slot: Any, group: Any, first: Any, end: Any) -> None:
    """A sequence lets go of pages that others may hold, `first` to `end` of a group, the last one first."""
    for page in range(end - 1, first - 1, -1):
        at = _held(x, _key(w, x, int(w.q[slot].request), page), group, slot)
        entry = x.c.entries[at]
        entry.owner = NONE if entry.owner == slot else entry.owner
        entry.refs -= 1
        if entry.refs == 0:
            w.c[0].pages_held -= 1
            _link(x, at)


@rule
def _join(x: Any, at: Any) -> bool:
    """One more holds a page; whether nobody did."""
    entry = x.c.entries[at]
    entry.refs += 1
    if entry.refs == 1:
        _unlink(x, at)
    return entry.refs == 1


@rule
def _add(x: Any, key: Any, group: Any, slot: Any) -> None:
    """A new page, which one sequence holds: behind older ones of the same key."""
    counts, bucket = x.c.at[0], (key + group) & (len(x.c.buckets) - 1)
    at = int(counts.unused)
    entry = x.c.entries[at]
    counts.unused = entry.next
    entry.key = key
    entry.group = group
    entry.refs = 1
    entry.owner = slot
    entry.next = NONE
    last = int(x.c.buckets[bucket])
    if last < 0:
        x.c.buckets[bucket] = at
        return
    while x.c.entries[last].next >= 0:
        last = int(x.c.entries[last].next)
    x.c.entries[last].next = at


@rule
def _evict(x: Any) -> None:
    """Forget the page that has been idle longest."""
    counts = x.c.at[0]
    at = int(counts.oldest)
    _unlink(x, at)
    entry = x.c.entries[at]
    bucket = (int(entry.key) + int(entry.group)) & (len(x.c.buckets) - 1)
    before = int(x.c.buckets[bucket])
    if before == at:
        x.c.buckets[bucket] = entry.next
    else:
        while x.c.entries[before].next != at:
            before = int(x.c.entries[before].next)
        x.c.entries[before].next = entry.next
    entry.next = counts.unused
    counts.unused = at


@rule
def _link(x: Any, at: Any) -> None:
    """A page comes idle, as the newest."""
    counts, entry = x.c.at[0], x.c.entries[at]
    entry.older = counts.newest
    entry.newer = NONE
    if counts.newest >= 0:
        x.c.entries[counts.newest].newer = at
    else:
        counts.oldest = at
    counts.newest = at
    counts.idle += 1


@rule
def _unlink(x: Any, at: Any) -> None:
    """A page is idle no more."""
    counts, entry = x.c.at[0], x.c.entries[at]
    if entry.older >= 0:
        x.c.entries[entry.older].newer = entry.newer
    else:
        counts.oldest = entry.newer
    if entry.newer >= 0:
        x.c.entries[entry.newer].older = entry.older
    else:
        counts.newest = entry.older
    counts.idle -= 1
