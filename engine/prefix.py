"""Prefix caching: requests share KV pages, which stay in the pool until room is needed.

A page is identified by all tokens up to its end (vLLM chains block hashes; SGLang and LMDeploy keep a tree). A held
page counts once. A page without holders is idle: reusable, and the longest idle is evicted first. A request's
last page becomes idle first, so that prefixes outlive extensions; pages of layers with a window before the others, as
in vLLM.

In vLLM each group of layers with a window shares its own pages of the same tokens (windows.py). A prefix is found as
far as all groups have it: layers without a window need all its pages, a group with a window those in sight of its end.
Such a group keeps only pages in sight of places where later requests may begin (`_findable`); others are free when no
one holds them.
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
from .records import I4, I8, Record, Table, columns_of, dtype_of, table
from .state import AnyPolicy, PolicyState, Replica, num_arrived
from .windows import num_left, window_groups


class SharedColumns(Record):
    shared: I4  # first pages that other requests may also hold
    gone: I4  # first pages of each group with a window that left it or were never taken
    found: I4  # first pages found at admission
    junction: I4  # ... in layers without a window alone, if more; else 0


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
    group: I4  # 0: layers without a window; from 1: with one


class Pool(Record):
    block: I8  # tokens of a name
    per_block: I8  # pages that may end within them
    unused: I8  # first unused entry
    oldest: I8  # idle page
    newest: I8  # idle page
    idle: I8  # idle pages
    junction: I8  # pages found in layers without a window at the last lookup, if others lacked some; else 0
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

    @property
    def num_names(self) -> int:
        """An upper bound of names."""
        return int(self.names.max(initial=-1)) + 1


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

    @property
    def num_names(self) -> int:
        return 1 << 62

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
    columns = prefixes.offsets, prefixes.names, prefixes.named, prefixes.cached
    return Cache(*columns, entries=table(entries), buckets=buckets, pool=table(pool))


@dataclass(frozen=True)
class PrefixMemory(PagedMemory):
    """A paged KV cache; requests that begin alike reuse its full pages."""

    prefix_caching: Annotated[
        bool, "reuse the pages of requests that begin alike (needs a trace with hash_ids or sessions)"
    ] = False

    columns = columns_of(SharedColumns)

    def check(self, policy: Policy) -> None:
        if self.prefix_caching and not policy.batching.shares_prefixes(policy):
            kinds = type(policy.batching).__name__, type(policy.granularity).__name__
            raise PolicyError(
                f"{policy.name}: prefix_caching is true, and {kinds[0]} reuses no pages of {kinds[1]}: expected false"
            )

    def answers(self, policy: Policy) -> Answers:
        if not self.prefix_caching:
            return {}
        answers: dict[Any, Any] = {reusable: pages_found, reuse: take_found, hold: share_pages, give_back: let_go}
        if policy.batching.hashes_all:
            answers |= {reusable: pages_found_by_groups, leave_sight: let_go_unseen}
        return answers

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        hash_ahead = policy.granularity.numbers(policy).get("hash_ahead", 0)
        return {"hashes_all": policy.batching.hashes_all, "hash_ahead": hash_ahead}

    def cache(self, num_pages: int, prefixes: Prefixes | None) -> Any:
        if not self.prefix_caching:
            return ()
        return empty(num_pages, self.page_size, prefixes or Prefixes(1, [], []))


def caches_prefixes(policy: Policy) -> bool:
    return isinstance(policy.memory, PrefixMemory) and policy.memory.prefix_caching


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
def _find(policy: AnyPolicy, key: int, group: int) -> int:
    """A group's page, or NONE."""
    index = int(policy.cache.buckets[(key + group) & (len(policy.cache.buckets) - 1)])
    while index >= 0 and (policy.cache.entries[index].key != key or policy.cache.entries[index].group != group):
        index = int(policy.cache.entries[index].next)
    return index


@rule
def _held(policy: AnyPolicy, key: int, group: int, slot: int) -> int:
    """The page held by a sequence: the one it computed, else the oldest."""
    index = int(policy.cache.buckets[(key + group) & (len(policy.cache.buckets) - 1)])
    while index >= 0:
        entry = policy.cache.entries[index]
        if entry.key == key and entry.group == group and entry.owner == slot:
            return index
        index = int(entry.next)
    return _find(policy, key, group)


@rule
def _groups(replica: Replica, policy: SharedState) -> int:
    """Groups of layers with a window that share pages (vLLM)."""
    if policy.fields.hashes_all:
        return window_groups(replica.fixed)
    return 0


@rule
def _first_of_group(replica: Replica, group: int, tokens: int) -> int:
    """The first page of a prefix of `tokens` that a group needs; group 0 has no window."""
    if group == 0:
        return 0
    return num_left(replica.fixed, tokens)


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
        index = _find(policy, _key(replica, policy, request, num), 0)
        if index < 0:
            break
        if policy.cache.entries[index].refs > 0:
            shared += 1
        num += 1
    return num * replica.fixed.page, shared


@rule
def pages_found_by_groups(replica: Replica, policy: SharedState, request: int, tokens: int) -> tuple[int, int]:
    """`pages_found` for vLLM with windows.

    vllm/v1/core/kv_cache_coordinator.py of 0.32.0, `find_longest_cache_hit`.
    """
    size, groups = replica.fixed.page, _groups(replica, policy)
    cached, shared = pages_found(replica, policy, request, tokens)
    if groups == 0 or num_arrived(replica, request) > 0:
        policy.cache.pool[0].junction = 0  # layers with a window receive only the prompt's end
        return cached, shared
    last = longest = cached // size
    lacking = _last_lacking(replica, policy, request, last)
    while lacking >= 0:
        last = lacking
        lacking = _last_lacking(replica, policy, request, last)
    policy.cache.pool[0].junction = longest * (longest > last)
    shared = 0
    for group in range(groups + 1):
        for page in range(_first_of_group(replica, group, last * size), last):
            shared += int(policy.cache.entries[_find(policy, _key(replica, policy, request, page), group)].refs > 0)
    return last * size, shared


@rule
def _last_lacking(replica: Replica, policy: AnyPolicy, request: int, last: int) -> int:
    """The last page in sight of a prefix's end that a group with a window lacks, or NONE."""
    first = num_left(replica.fixed, last * replica.fixed.page)
    for page in range(last - 1, first - 1, -1):
        for group in range(1, _groups(replica, policy) + 1):
            if _find(policy, _key(replica, policy, request, page), group) < 0:
                return page
    return NONE


@rule
def _findable(replica: Replica, policy: SharedState, slot: int, page: int) -> bool:
    """Whether a group with a window keeps a sequence's page for later requests.

    Pages in sight of the prompt's end and of its junction with earlier prompts
    (vllm/v1/core/single_type_kv_cache_manager.py of 0.32.0, `reachable_block_mask`).
    """
    fixed, columns = replica.fixed, policy.columns[slot]
    if page < columns.found:
        return True
    size = fixed.page
    span = -(-(fixed.keeps - 1) // size)
    # An equal prompt recomputes its last token.
    end, junction = (int(replica.sequences[slot].prompt) - 1) // size, int(columns.junction)
    return end - span <= page < end or junction - span <= page < junction


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
    columns.gone = num_left(replica.fixed, tokens)
    if arrived:
        pages = int(row.found) // size
        counters.pages_held -= row.reserved  # already counted
        row.reserved = 0
        row.found = 0
    else:
        for group in range(_groups(replica, policy) + 1):
            for page in range(_first_of_group(replica, group, tokens), pages):
                if not _join(policy, _find(policy, _key(replica, policy, int(sequence.request), page), group)):
                    counters.pages_held -= 1  # already counted
    columns.shared = pages
    columns.found = pages
    columns.junction = counts.junction
    if row.num_preemptions == 0 and not arrived:
        counts.queries += sequence.prompt
        counts.hits += tokens
        if sequence.request < len(policy.cache.cached):
            policy.cache.cached[sequence.request] = tokens


@rule
def refresh_found(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> None:
    """Make found but unused idle pages the newest, the last page first."""
    for i in range(int(tokens) // replica.fixed.page - 1, -1, -1):
        index = _find(policy, _key(replica, policy, request, i), 0)
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
            index = _find(policy, key, 0)
        if index < 0:
            _add(policy, key, 0, slot)
        elif not _join(policy, index):
            counters.pages_held -= 1
        if pages.shared >= pages.gone:
            groups = _groups(replica, policy)
            if groups > 0 and _findable(replica, policy, slot, int(pages.shared)):
                for group in range(1, groups + 1):
                    _add(policy, key, group, slot)
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
    num = 0
    for group in range(_groups(replica, policy) + 1):
        for page in range(_first_of_group(replica, group, tokens), cached // replica.fixed.page):
            entries[num] = _find(policy, _key(replica, policy, request, page), group)
            num += 1
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
    groups = _groups(replica, policy)
    counters.pages_held -= (
        sequence.pages - pages.shared + sequence.window_pages - groups * max(0, int(pages.shared) - int(pages.gone))
    )
    for k in range(1, groups + 2):
        group = k % (groups + 1)  # models with windows begin with such a layer
        _let_go_pages(replica, policy, slot, group, int(pages.gone) * (group > 0), int(pages.shared))
    pages.shared = 0
    pages.gone = 0
    sequence.pages = 0
    sequence.window_pages = 0


@rule
def let_go_unseen(replica: Replica, policy: SharedState, slot: int, start: int) -> None:
    """Free a sequence's pages that left the windows, the last first."""
    counters, sequence, pages = replica.counters, replica.sequences[slot], policy.columns[slot]
    groups = _groups(replica, policy)
    if groups == 0:
        return
    gone = min(num_left(replica.fixed, start), int(sequence.pages))
    if gone <= pages.gone:
        return
    counters.pages_held -= groups * (gone - max(int(pages.gone), min(gone, int(pages.shared))))
    for group in range(1, groups + 1):
        _let_go_pages(replica, policy, slot, group, int(pages.gone), min(gone, int(pages.shared)))
    sequence.window_pages -= groups * (gone - pages.gone)
    pages.gone = gone


@rule
def _let_go_pages(replica: Replica, policy: SharedState, slot: int, group: int, first: int, end: int) -> None:
    """Release a group's shared pages `first` to `end`, the last first."""
    for page in range(end - 1, first - 1, -1):
        if group > 0 and not _findable(replica, policy, slot, page):
            replica.counters.pages_held -= 1
            continue
        index = _held(policy, _key(replica, policy, int(replica.sequences[slot].request), page), group, slot)
        entry = policy.cache.entries[index]
        if entry.owner == slot:
            entry.owner = NONE
        entry.refs -= 1
        if entry.refs == 0:
            replica.counters.pages_held -= 1
            _link(policy, index)


@rule
def _join(policy: AnyPolicy, index: int) -> bool:
    """Add a holder to a page; returns whether it was idle."""
    entry = policy.cache.entries[index]
    entry.refs += 1
    if entry.refs == 1:
        _unlink(policy, index)
    return entry.refs == 1


@rule
def _add(policy: AnyPolicy, key: int, group: int, slot: int) -> None:
    """Add a page with one holder, after older copies."""
    counts, bucket = policy.cache.pool[0], (key + group) & (len(policy.cache.buckets) - 1)
    index = int(counts.unused)
    entry = policy.cache.entries[index]
    counts.unused = entry.next
    entry.key = key
    entry.group = group
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
    bucket = (int(entry.key) + int(entry.group)) & (len(policy.cache.buckets) - 1)
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
