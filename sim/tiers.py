"""KV tiers below the prefix cache: host memory, disks, and a store shared by replicas.

    a page is full (write=through) or evicted (write=evict) -> first tier -> next one
    admission -> lookup in GPU and tiers -> the request waits while missing pages are loaded -> queue

Transfers share each direction of a tier equally (processor sharing); lower tiers' pages pass through the host. A
waiting request blocks no others (fleet.md 5).
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.errors import PolicyError, quoted
from ..engine.offload import Change, Found, Offload
from ..engine.prefix import Prefixes
from .by_name import values
from .clock import Clock
from .link import Link, Wire
from .setting import Setting

WRITES = ("through", "evict")
_SIZES = {"MB": "1e6", "GB": "1e9", "TB": "1e12", "MiB": "1048576", "GiB": "1073741824", "TiB": "1099511627776"}
# Default bandwidth each way and latency, nearest tier first: AISimulate 0.13 (fleet.md 5).
DEFAULTS = {"host": "32GB/s", "disk": "10GB/s,100us", "shared": "50GB/s,1ms"}
_EXAMPLE = "host:64GB@50GB/s,10us"


@dataclass(frozen=True)
class Tier:
    """`shared` is one store per pool; each replica has its own host and disk."""

    name: str  # host, disk or shared
    capacity: float  # bytes; infinity: drops nothing
    bandwidth: float  # bytes/s, each way; infinity: latency only
    latency: float = 0.0  # s before the first byte
    write: str = "through"  # pages come when full in the tier above, or when evicted there
    pool: str = ""  # empty: all pools with prefix caches

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NAME:CAPACITY[@BANDWIDTH[,LATENCY]][,field=value...]`, or raise PolicyError."""
        asker = f"tier {quoted(text)}"
        name, colon, rest = text.partition(":")
        if name not in DEFAULTS or not colon:
            raise PolicyError(f"{asker}: it names no tier, expected one of {', '.join(DEFAULTS)}, such as {_EXAMPLE}")
        first, *items = rest.split(",")
        size, at, bandwidth = first.partition("@")
        link = [bandwidth] if at else DEFAULTS[name].split(",")
        if at and items and "=" not in items[0]:
            link.append(items.pop(0))
        try:
            speed = Link.parse(",".join(link))
        except PolicyError as error:
            raise PolicyError(f"{asker}: {error}") from None
        own = [field.name for field in fields(cls)][4:]
        given = values(items, dict.fromkeys(own, str), own, asker)
        if given.get("write", "through") not in WRITES:
            raise PolicyError(f"{asker}: write is {quoted(given['write'])}, expected one of {', '.join(WRITES)}")
        return cls(name, _capacity(size, asker), speed.bandwidth, speed.latency, **given)

    @property
    def is_instant(self) -> bool:
        return math.isinf(self.bandwidth) and self.latency == 0


def _capacity(text: str, asker: str) -> float:
    if text == "inf":
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    if found is None or found[2] not in _SIZES or not float(found[1]):
        raise PolicyError(f"{asker}: {quoted(text)} is no capacity above 0 in {', '.join(_SIZES)}, such as {_EXAMPLE}")
    return float(Decimal(found[1]) * Decimal(_SIZES[found[2]]))


def tiers_of(tiers: Sequence[Tier], pool: str) -> tuple[Tier, ...]:
    """A pool's tiers, nearest first; PolicyError for duplicates."""
    own = [tier for tier in tiers if tier.pool in ("", pool)]
    for name in DEFAULTS:
        if (times := sum(tier.name == name for tier in own)) > 1:
            raise PolicyError(f"tier {name} is given {times} times for pool {pool}, expected once")
    return tuple(sorted(own, key=lambda tier: list(DEFAULTS).index(tier.name)))


@dataclass
class TierUse:
    """A run's use of a tier, over its stores."""

    tier: Tier
    pool: str
    page_bytes: int
    stores: int = 0
    seconds: float = 0.0  # summed lifetimes of its stores
    loaded_tokens: int = 0  # of prompts, found here and not above
    read_bytes: int = 0  # sent up
    written_bytes: int = 0
    dropped_bytes: int = 0  # least recently used, to make room
    held_bytes: int = 0  # at the end
    most_bytes: int = 0  # held by a store


@dataclass(frozen=True)
class Tiered:
    uses: tuple[TierUse, ...]
    deferred: npt.NDArray[np.float64]  # [requests] s waited for loads
    loaded: npt.NDArray[np.int64]  # [requests] tokens in tiers but not on the GPU
    changes: dict[int, list[Change]] = field(default_factory=dict)  # by replica, for a journal


class Store:
    """A tier's pages in one place, least recently used first, and its wires."""

    def __init__(self, env: Clock, use: TierUse) -> None:
        self.tier, self.use = use.tier, use
        self._env, self._since = env, env.now
        self._most = math.inf if math.isinf(use.tier.capacity) else int(use.tier.capacity // use.page_bytes)
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._coming: set[int] = set()  # being written
        link = Link(use.tier.bandwidth, use.tier.latency)
        self._up, self._down = Wire(env, link), Wire(env, link)
        self.below: Store | None = None
        use.stores += 1

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def names(self) -> list[int]:
        return list(self._pages)

    def touch(self, pages: Sequence[int]) -> None:
        """Use pages; the last counts as used first, so that prefixes outlive what follows."""
        for page in reversed(pages):
            self._pages.move_to_end(page)

    def read(self, pages: Sequence[int], then: Callable[[], None]) -> None:
        self.use.read_bytes += len(pages) * self.use.page_bytes
        self._send(self._up, len(pages), then)

    def write(self, pages: Iterable[int]) -> None:
        """Write missing pages; each is there once its transfer ends."""
        new = [page for page in pages if page not in self._pages and page not in self._coming]
        if new:
            self._coming.update(new)
            self.use.written_bytes += len(new) * self.use.page_bytes
            self._send(self._down, len(new), partial(self.put, new))

    def put(self, pages: Sequence[int]) -> None:
        """Store pages as the newest; pass on what the next tier gets."""
        self._coming.difference_update(pages)
        new = [page for page in pages if page not in self._pages]
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        below, gone = self.below, []
        while len(self._pages) > self._most:
            gone.append(self._pages.popitem(last=False)[0])
        self.use.dropped_bytes += len(gone) * self.use.page_bytes
        self.use.most_bytes = max(self.use.most_bytes, len(self._pages) * self.use.page_bytes)
        if below is not None:
            below.write(new if below.tier.write == "through" else gone)

    def close(self) -> None:
        """Count bytes and time at the end of run or replica."""
        self.use.held_bytes += len(self._pages) * self.use.page_bytes
        self.use.seconds += self._env.now - self._since

    def _send(self, wire: Wire, pages: int, then: Callable[[], None]) -> None:
        if self.tier.is_instant:
            then()
        else:
            wire.send(float(pages * self.use.page_bytes), then)


@dataclass(eq=False)
class _Load:
    """Pages on their way to a replica, for a request."""

    request: int
    pages: list[int]
    pinned: npt.NDArray[np.int64]
    left: int = 0  # unfinished transfers
    waiting: list[int] = field(default_factory=list)  # other requests that wait for these pages


class Hierarchy:
    """A replica's tiers: pages that its prefix cache gains or loses move between them."""

    def __init__(
        self, env: Clock, engine: Engine, prefixes: Prefixes, stores: Sequence[Store], wake: Callable[[], None],
        tiered: Tiered, log: list[Change] | None,
    ) -> None:  # fmt: skip
        self._env, self._stores, self._wake, self._tiered = env, stores, wake, tiered
        self._engine, self._offload = engine, Offload(engine, prefixes, self._before_step, log, lambda: env.now)
        self._loading: dict[int, _Load] = {}  # by page
        self._since: dict[int, float] = {}  # request -> s
        self._seen: set[int] = set()  # requests looked up
        self._for_room: list[int] = []  # deferred until pages have room
        self._unwritten: list[int] = []  # pages of a step decided ahead

    def _before_step(self, now: float) -> None:
        self.before_step()
        self._offload.decides(now)

    def before_step(self) -> None:
        """Write what the last step computed; start loading what the next decision could admit."""
        self._note_changes()
        for request in self._for_room:
            self._put_back(request)
        self._for_room = []
        most = self._offload.may_admit
        if not most or not self._engine.num_waiting:
            return
        engine, skips = self._engine, self._engine.policy.batching.skips_ahead
        room, tokens, full = self._offload.room, 0, False
        for request, slot in engine.waiting(most):
            if slot >= 0 and engine.state[0].sequences["pages"][slot] > 0:
                continue  # it keeps its pages
            if engine.table["arrived"][request] > 0 and slot < 0:
                continue  # its KV came over a link
            found = self._offload.lookup(request, self)
            self._use(request, found.cached)
            room -= found.pages
            if not found.lacking:
                tokens += found.uncached
                if not skips and (room < 0 or tokens >= self._offload.budget):
                    return
            elif load := self._load_of(found.lacking):
                self._defer(request)
                load.waiting.append(request)
            elif not full and min(room, self._offload.room - len(found.cached) - len(found.lacking)) >= 0:
                self._load(request, found)
            elif skips:  # it would be admitted without them
                full = True
                self._defer(request)
                self._for_room.append(request)
            else:
                return

    def _use(self, request: int, cached: list[int]) -> None:
        """At a request's first lookup: its pages count as used, missing ones are written."""
        if request in self._seen:
            return
        self._seen.add(request)
        for store in self._stores:
            store.touch([page for page in cached if page in store])
        if self._stores[0].tier.write == "through":
            self._stores[0].write(cached)

    def __contains__(self, page: object) -> bool:
        return any(page in store for store in self._stores)

    def places(self, request: int) -> dict[str, int]:
        """Pages of the longest prefix in GPU and tiers, by nearest place."""
        found: dict[str, int] = {}
        for page in self._offload.pages(request):
            at = "gpu" if page in self._offload else next((s.tier.name for s in self._stores if page in s), None)
            if at is None:
                break
            found[at] = found.get(at, 0) + 1
        return found

    def _load_of(self, pages: Sequence[int]) -> "_Load | None":
        """A load in flight of any of these pages."""
        return next((self._loading[page] for page in pages if page in self._loading), None)

    # ---- down ------------------------------------------------------------------------------------------------

    def _note_changes(self) -> None:
        came, gone = self._offload.changes()
        if self._stores[0].tier.write == "evict":
            self._stores[0].write(gone)
            return
        due = self._unwritten
        self._unwritten = []
        if self._offload.decided_ahead:
            self._unwritten = came
        else:
            due = due + came
        self._stores[0].write(due)

    # ---- up --------------------------------------------------------------------------------------------------

    def _load(self, request: int, prefix: Found) -> None:
        """Load what the GPU lacks from the nearest tiers while the request waits."""
        first, left = self._stores[0], prefix.lacking
        load = _Load(request, left, self._offload.pin(request, prefix.cached, len(left)))
        self._loading.update(dict.fromkeys(left, load))
        groups, size = self._offload.groups + 1, self._engine.page_size
        found: list[tuple[Store, list[int]]] = []
        for store in self._stores:
            own = [page for page in left if page in store]
            left = [page for page in left if page not in store]
            if own:
                found.append((store, own))
                store.touch(own)
                tokens = sum(page % groups == 0 for page in own) * size
                store.use.loaded_tokens += tokens
                self._tiered.loaded[request] += tokens
        load.left = len(found)
        self._defer(request)
        for store, own in found:
            if store is first or first.tier.name != "host":
                store.read(own, partial(self._landed, load))
            else:
                store.read(own, partial(self._through_host, load, own))

    def _through_host(self, load: _Load, pages: list[int]) -> None:
        first = self._stores[0]
        first.put(pages)
        first.read(pages, partial(self._landed, load))

    def _landed(self, load: _Load) -> None:
        """A transfer ended; after a load's last one its requests are queued again."""
        load.left -= 1
        if load.left:
            return
        self._offload.insert(load.request, load.pages, load.pinned)
        for page in load.pages:
            del self._loading[page]
        for request in sorted([load.request, *load.waiting]):
            self._put_back(request)
        self._wake()

    def _defer(self, request: int) -> None:
        self._since[request] = self._env.now
        self._offload.defer(request)

    def _put_back(self, request: int) -> None:
        self._tiered.deferred[request] += self._env.now - self._since.pop(request)
        self._offload.put_back(request)


class Hierarchies:
    """All pools' tiers in a run."""

    def __init__(
        self, env: Clock, tiers: Sequence[Tier], prefixes: Prefixes | None, num_requests: int, journal: bool = False
    ) -> None:
        self._env, self._tiers, self._prefixes = env, tiers, prefixes
        self._uses: dict[str, tuple[TierUse, ...]] = {}  # by pool
        self._shared: dict[str, Store] = {}
        self._open: dict[int, list[Store]] = {}  # by replica, without shared ones
        self._of: dict[int, Hierarchy] = {}  # by replica
        self._changes: dict[int, list[Change]] | None = {} if journal else None  # by replica
        self._deferred, self._loaded = np.zeros(num_requests), np.zeros(num_requests, np.int64)

    def attach(self, pool: str, setting: Setting, engine: Engine, wake: Callable[[], None]) -> bool:
        """Give a replica its pool's tiers; returns whether it has any."""
        own = tiers_of(self._tiers, pool)
        if not own or self._prefixes is None or engine.prefix_cache is None:
            return False
        if pool not in self._uses:
            page = page_bytes(setting)
            self._uses[pool] = tuple(TierUse(tier, pool, page) for tier in own)
        stores = []
        for use in self._uses[pool]:
            if use.tier.name != "shared":
                stores.append(Store(self._env, use))
            else:
                if pool not in self._shared:
                    self._shared[pool] = Store(self._env, use)
                stores.append(self._shared[pool])
        for above, below in pairwise(stores):
            above.below = below
        self._open[engine.replica] = [store for store in stores if store.tier.name != "shared"]
        log = None if self._changes is None else self._changes.setdefault(engine.replica, [])
        self._of[engine.replica] = Hierarchy(self._env, engine, self._prefixes, stores, wake, self._so_far, log)
        return True

    def pages(self, replica: int, request: int) -> dict[str, int] | None:
        """Where a replica's pages of a prompt are; None: no tiers."""
        found = self._of.get(replica)
        return None if found is None else found.places(request)

    def detach(self, replica: int) -> None:
        """Remove a replica with its host and disk pages."""
        self._of.pop(replica, None)
        for store in self._open.pop(replica, []):
            store.close()

    @property
    def _so_far(self) -> Tiered:
        return Tiered((), self._deferred, self._loaded, self._changes or {})

    def end(self) -> Tiered:
        """Results at the run's end."""
        for replica in list(self._open):
            self.detach(replica)
        for store in self._shared.values():
            store.close()
        uses = tuple(use for of_pool in self._uses.values() for use in of_pool)
        return replace(self._so_far, uses=uses)


def page_bytes(setting: Setting) -> int:
    return setting.policy.memory.page_size * setting.memory.kv_bytes_per_token


def check_tiers(tiers: Sequence[Tier], pools: dict[str, Setting]) -> None:
    """PolicyError for tiers that no pool can have."""
    for tier in tiers:
        if tier.pool and tier.pool not in pools:
            raise PolicyError(f"tier names the pool {quoted(tier.pool)}, expected one of {', '.join(pools)}")
    for name, setting in pools.items():
        for tier in tiers_of(tiers, name):
            if tier.capacity < (page := page_bytes(setting)):
                raise PolicyError(
                    f"tier {tier.name} of pool {name} holds {tier.capacity:g} bytes, expected at least a page of "
                    f"{page:,}"
                )
