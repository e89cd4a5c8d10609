"""Prefix caching: requests share KV pages, which stay in the pool until room is needed.

A page is identified by all tokens up to its end (vLLM chains block hashes; SGLang and LMDeploy keep a tree). A held
page counts once. A page without holders is idle: reusable, and the longest idle is evicted first. A request's
last page becomes idle first, so that prefixes outlive extensions. Layers with a window keep all pages, as in vLLM
with --disable-hybrid-kv-cache-manager.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PolicyError
from .hooks import give_back, hold, reusable, reuse
from .jit import rule
from .part import Answers, PagedMemory, Policy
from .records import I4, I8, Record, Table, columns_of, dtype_of, table
from .state import AnyPolicy, PolicyState, Replica, num_arrived


class SharedColumns(Record):
    shared: I4  # first pages that other requests may also hold


SharedState = PolicyState[Any, SharedColumns, Any]


Ints = npt.NDArray[np.int64]

NONE = -1


class Entry(Record):
    """A page of the pool and its content."""

    key: I8  # see `_key`
    refs: I4  # sequences that hold it; 0: idle
    owner: I4  # slot that computed and still holds it
    next: I4  # in its bucket's chain, or among unused entries
    older: I4  # idle page before it
    newer: I4  # ... and after it


class Pool(Record):
    block: I8  # tokens of a name
    per_block: I8  # pages that may end within them
    unused: I8  # first unused entry
    oldest: I8  # idle page
    newest: I8  # idle page
    idle: I8  # idle pages
    queries: I8  # prompt tokens looked up
    hits: I8  # ... found


ENTRY, POOL = dtype_of(Entry), dtype_of(Pool)


class Prefixes:
    """Prefixes of a run's requests: a name for each `block` tokens, equal if all tokens up to there are.

    names: a list per request. named [requests]: first tokens with a name: the prompt, and an answer that later requests
    repeat. cached [requests], set by the engine: prompt tokens in the pool at first admission.
    """

    def __init__(self, block: int, names: Sequence[Sequence[int]], named: Sequence[int]) -> None:
        self.block = block
        self.offsets = np.concatenate([[0], np.cumsum([len(row) for row in names], dtype=np.int64)])  # of requests
        self.names = np.array(list(chain.from_iterable(names)), np.int64)
        self.named = np.array(named, np.int64)
        self.cached = np.zeros(len(named), np.int64)
        assert (self.named <= np.diff(self.offsets) * block).all(), "more tokens are named than there are names for"

    def of(self, request: int) -> Ints:
        return self.names[self.offsets[request] : self.offsets[request + 1]]


class ToldPrefixes(Prefixes):
    """A server's prefixes, added as requests arrive: a name for each page of a prompt.

    num_requests: in the server's lifetime. `names` is replaced when it grows.
    """

    def __init__(self, page: int, num_requests: int) -> None:
        self.block = page
        self.offsets = np.zeros(num_requests + 1, np.int64)
        self.names = np.zeros(1 << 12, np.int64)
        self.named = np.zeros(num_requests, np.int64)
        self.cached = np.zeros(num_requests, np.int64)

    def tell(self, request: int, tokens: npt.NDArray[np.int32]) -> None:
        """Name the next request's prompt pages by a hash chain, the last one in part."""
        begin, pages = int(self.offsets[request]), -(-len(tokens) // self.block)
        while begin + pages > len(self.names):
            self.names = np.concatenate([self.names, np.zeros_like(self.names)])
        name = b""
        for i in range(pages):
            page = tokens[i * self.block : (i + 1) * self.block]
            name = blake2b(name + page.tobytes(), digest_size=8).digest()
            self.names[begin + i] = int.from_bytes(name, "little") >> 2
        self.named[request] = len(tokens)
        self.offsets[request + 1] = begin + pages


class Cache(NamedTuple):
    """A replica's pages, found by content."""

    offsets: Ints  # of Prefixes, with the next three
    names: Ints
    named: Ints
    cached: Ints
    entries: Table[Entry]  # [pages]
    buckets: npt.NDArray[np.int32]  # [a power of two] first entry of each chain, by the key's last bits
    pool: Table[Pool]  # [1]


def empty(num_pages: int, page: int, prefixes: Prefixes) -> Cache:
    """The cache of an unused pool."""
    per_block, room = -(-prefixes.block // page), max(1, num_pages)
    entries, pool = np.zeros(room, ENTRY), np.zeros(1, POOL)
    entries["next"] = np.arange(1, room + 1)
    entries["next"][-1] = NONE
    pool["block"], pool["per_block"] = prefixes.block, per_block
    pool["oldest"] = pool["newest"] = NONE
    buckets = np.full(1 << (2 * room - 1).bit_length(), NONE, np.int32)
    columns = {name: getattr(prefixes, name) for name in ("offsets", "names", "named", "cached")}
    return Cache(**columns, entries=table(entries), buckets=buckets, pool=table(pool))


@dataclass(frozen=True)
class PrefixMemory(PagedMemory):
    """A paged KV cache; requests that begin alike reuse its full pages."""

    prefix_caching: Annotated[
        bool, "reuse the pages of requests that begin alike (needs a trace with hash_ids or sessions)"
    ] = False

    columns = columns_of(SharedColumns)

    @property
    def shares_pages(self) -> bool:  # type: ignore[override]
        return self.prefix_caching

    def check(self, policy: Policy) -> None:
        if self.prefix_caching and not policy.batching.shares_prefixes(policy):
            kinds = type(policy.batching).__name__, type(policy.granularity).__name__
            raise PolicyError(
                f"{policy.name}: prefix_caching is true, and {kinds[0]} reuses no pages of {kinds[1]}: expected false"
            )

    def answers(self, policy: Policy) -> Answers:
        if not self.prefix_caching:
            return {}
        return {reusable: pages_found, reuse: take_found, hold: share_pages, give_back: let_go}

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        hash_ahead = policy.granularity.numbers(policy).get("hash_ahead", 0)
        return {"hashes_all": policy.batching.hashes_all, "hash_ahead": hash_ahead}

    def cache(self, num_pages: int, prefixes: Prefixes | None) -> Any:
        if not self.prefix_caching:
            return ()
        return empty(num_pages, self.page_size, prefixes or Prefixes(1, [], []))


def caches_prefixes(policy: Policy) -> bool:
    return policy.memory.shares_pages


@rule
def _key(replica: Replica, policy: SharedState, request: int, page: int) -> int:
    """A page's key: the name of its last tokens, and its place among pages of that name.

    It identifies all tokens up to the page's end; for EAGLE on vLLM, up to the next token, which the drafter's KV of
    the page depends on. Unnamed pages are the request's own.
    """
    pool, size, ahead = policy.cache.pool[0], replica.fixed.page, int(policy.fields.hash_ahead)
    end = (page + 1) * size + ahead
    if end > _num_named(policy, request):
        return -1 - ((int(request) << 32) + int(page))
    block = (end - 1) // pool.block
    before = (block * pool.block - ahead) // size  # pages identified before the block begins
    return int(policy.cache.names[policy.cache.offsets[request] + block]) * pool.per_block + page - before


@rule
def _find(policy: AnyPolicy, key: int) -> int:
    """The oldest page with this key, or NONE."""
    index = int(policy.cache.buckets[key & (len(policy.cache.buckets) - 1)])
    while index >= 0 and policy.cache.entries[index].key != key:
        index = int(policy.cache.entries[index].next)
    return index


@rule
def _page_of(policy: AnyPolicy, key: int, slot: int) -> int:
    """The page held by a sequence: the one it computed, else the oldest."""
    index = int(policy.cache.buckets[key & (len(policy.cache.buckets) - 1)])
    while index >= 0:
        entry = policy.cache.entries[index]
        if entry.key == key and entry.owner == slot:
            return index
        index = int(entry.next)
    return _find(policy, key)


@rule
def _num_named(policy: AnyPolicy, request: int) -> int:
    """First tokens of a request with names."""
    if request < len(policy.cache.named):
        return int(policy.cache.named[request])
    return 0


@rule
def _shareable(replica: Replica, policy: SharedState, request: int, tokens: int) -> int:
    """Full pages of the first `tokens` that the pool keeps: vLLM keeps all, others named ones."""
    if not policy.fields.hashes_all:
        tokens = min(int(tokens), _num_named(policy, request))
    return int(tokens) // replica.fixed.page


@rule
def pages_found(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> tuple[int, int]:
    """How many of the first `tokens` are in the pool, and how many of their pages are held.

    Tokens from a link have reserved pages (`hooks.reusable`).
    """
    if num_arrived(replica, request) > 0:
        return min(int(tokens), num_arrived(replica, request)), int(replica.requests[request].reserved)
    num = 0
    shared = 0
    limit = _shareable(replica, policy, request, tokens)
    while num < limit:
        index = _find(policy, _key(replica, policy, request, num))
        if index < 0:
            break
        if policy.cache.entries[index].refs > 0:
            shared += 1
        num += 1
    return num * replica.fixed.page, shared


@rule
def take_found(replica: Replica, policy: SharedState, slot: int, tokens: int) -> None:
    """Have an admitted sequence share the pages of its first `tokens`.

    A request that arrived with KV already holds its pages, and shares those found.
    """
    counters, sequence = replica.counters, replica.sequences[slot]
    columns, counts = policy.columns[slot], policy.cache.pool[0]
    row, size = replica.requests[sequence.request], replica.fixed.page
    arrived = num_arrived(replica, int(sequence.request)) > 0
    pages = int(tokens) // size
    if arrived:
        pages = int(row.found) // size
        counters.pages_held -= row.reserved  # already counted
        row.reserved = 0
        row.found = 0
    else:
        for page in range(pages):
            if not _join(policy, _find(policy, _key(replica, policy, int(sequence.request), page))):
                counters.pages_held -= 1  # already counted
    columns.shared = pages
    if row.num_preemptions == 0 and not arrived:
        counts.queries += sequence.prompt
        counts.hits += tokens
        if sequence.request < len(policy.cache.cached):
            policy.cache.cached[sequence.request] = tokens


@rule
def refresh_found(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> None:
    """Make found but unused idle pages the newest, the last page first."""
    for i in range(int(tokens) // replica.fixed.page - 1, -1, -1):
        index = _find(policy, _key(replica, policy, request, i))
        if index >= 0 and policy.cache.entries[index].refs == 0:  # arrived pages have no entry yet
            _unlink(policy, index)
            _link(policy, index)


@rule
def count_idle(replica: Replica, policy: AnyPolicy) -> int:
    return int(policy.cache.pool[0].idle)


@rule
def share_pages(replica: Replica, policy: SharedState, slot: int, tokens: int) -> None:
    """Evict idle pages as needed for held ones; share the pages of a sequence's first `tokens`.

    Of a page computed twice SGLang and LMDeploy keep one copy; vLLM keeps both and hits the older.
    """
    counters, sequence, pages = replica.counters, replica.sequences[slot], policy.columns[slot]
    make_room(replica, policy)
    limit = _shareable(replica, policy, int(sequence.request), tokens)
    while pages.shared < limit:
        key = _key(replica, policy, int(sequence.request), int(pages.shared))
        index = NONE
        if not policy.fields.hashes_all:
            index = _find(policy, key)
        if index < 0:
            _add(policy, key, slot)
        elif not _join(policy, index):
            counters.pages_held -= 1
        pages.shared += 1


@rule
def make_room(replica: Replica, policy: AnyPolicy) -> None:
    """Evict idle pages as needed for held ones."""
    counters, counts = replica.counters, policy.cache.pool[0]
    while counts.idle > 0 and counters.pages_held + counts.idle > replica.fixed.num_pages:
        _evict(policy)


@rule
def find_ahead(replica: Replica, policy: SharedState, request: int, tokens: int, entries: Ints) -> int:
    """How many of the first `tokens` the pool has, for a request that will come with KV.

    entries: filled with their pages' entries, then NONE.
    """
    cached = int(reusable(replica, policy, request, tokens)[0])
    for page in range(cached // replica.fixed.page):
        entries[page] = _find(policy, _key(replica, policy, request, page))
    return cached


@rule
def pin(replica: Replica, policy: AnyPolicy, pages: Ints) -> None:
    """Add a holder to these entries: an expected request."""
    for i in range(len(pages)):
        if _join(policy, pages[i]):
            replica.counters.pages_held += 1


@rule
def let_go(replica: Replica, policy: SharedState, slot: int) -> None:
    """Free a sequence's pages; shared ones without holders become idle, the last first."""
    counters, sequence, pages = replica.counters, replica.sequences[slot], policy.columns[slot]
    counters.pages_held -= sequence.pages - pages.shared
    for page in range(pages.shared - 1, -1, -1):
        index = _page_of(policy, _key(replica, policy, int(sequence.request), page), slot)
        entry = policy.cache.entries[index]
        if entry.owner == slot:
            entry.owner = NONE
        entry.refs -= 1
        if entry.refs == 0:
            counters.pages_held -= 1
            _link(policy, index)
    pages.shared = 0
    sequence.pages = 0


@rule
def _join(policy: AnyPolicy, index: int) -> bool:
    """Add a holder to a page; returns whether it was idle."""
    entry = policy.cache.entries[index]
    entry.refs += 1
    if entry.refs == 1:
        _unlink(policy, index)
    return entry.refs == 1


@rule
def _add(policy: AnyPolicy, key: int, slot: int) -> None:
    """Add a page with one holder, after older copies."""
    counts, bucket = policy.cache.pool[0], key & (len(policy.cache.buckets) - 1)
    index = int(counts.unused)
    entry = policy.cache.entries[index]
    counts.unused = entry.next
    entry.key = key
    entry.refs = 1
    entry.owner = slot
    entry.next = NONE
    last = int(policy.cache.buckets[bucket])
    if last < 0:
        policy.cache.buckets[bucket] = index
        return
    while policy.cache.entries[last].next >= 0:
        last = int(policy.cache.entries[last].next)
    policy.cache.entries[last].next = index


@rule
def _evict(policy: AnyPolicy) -> None:
    """Evict the page idle longest."""
    counts = policy.cache.pool[0]
    index = int(counts.oldest)
    _unlink(policy, index)
    entry = policy.cache.entries[index]
    bucket = int(entry.key) & (len(policy.cache.buckets) - 1)
    before = int(policy.cache.buckets[bucket])
    if before == index:
        policy.cache.buckets[bucket] = entry.next
    else:
        while policy.cache.entries[before].next != index:
            before = int(policy.cache.entries[before].next)
        policy.cache.entries[before].next = entry.next
    entry.next = counts.unused
    counts.unused = index


@rule
def _link(policy: AnyPolicy, index: int) -> None:
    """Make a page idle, the newest."""
    counts, entry = policy.cache.pool[0], policy.cache.entries[index]
    entry.older = counts.newest
    entry.newer = NONE
    if counts.newest >= 0:
        policy.cache.entries[counts.newest].newer = index
    else:
        counts.oldest = index
    counts.newest = index
    counts.idle += 1


@rule
def _unlink(policy: AnyPolicy, index: int) -> None:
    counts, entry = policy.cache.pool[0], policy.cache.entries[index]
    if entry.older >= 0:
        policy.cache.entries[entry.older].newer = entry.newer
    else:
        counts.oldest = entry.newer
    if entry.newer >= 0:
        policy.cache.entries[entry.newer].older = entry.older
    else:
        counts.newest = entry.older
    counts.idle -= 1
