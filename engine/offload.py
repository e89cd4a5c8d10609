"""A replica's prefix cache as KV tiers below it see it: the pages that it has, and room for pages that are loaded.

A page's name is one number for its key (prefix.py) and its group of layers. Tiers hold named pages alone, those that
another request can find.
"""

from collections.abc import Callable, Container, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .jit import plain
from .prefix import Prefixes
from .state import NOTHING
from .windows import num_left, window_groups

ROWS_KEPT = 256  # requests
_num_left, _window_groups = plain(num_left), plain(window_groups)


class Found(NamedTuple):
    """What there is of a request's prefix."""

    cached: list[int]  # pages in the cache
    lacking: list[int]  # pages that a tier has and the cache lacks, in order
    pages: int  # of the pool that the request's first step takes, with all of the prefix
    uncached: int  # tokens of the prompt that the cache alone lacks


class Offload:
    """The prefix cache of an engine, followed from decision to decision.

    before_step: called before each decision (Engine.watch).
    """

    def __init__(self, engine: Engine, prefixes: Prefixes, before_step: Callable[[float], None]) -> None:
        self.engine = engine
        engine.watch(before_step)
        cache: Any = engine.prefix_cache
        self._log, self._logged, self._refs = cache.log, np.asarray(cache.pool["logged"]), cache.entries["refs"]
        self._prefixes = prefixes
        self._rows: dict[int, list[list[int]]] = {}  # names of requests that were looked up lately
        self._entries: dict[int, list[int]] = {}  # of the pages that the cache has, the oldest first

    @cached_property
    def groups(self) -> int:
        """Groups of layers with a window, whose pages are shared one by one."""
        return int(_window_groups(self._fixed)) if self.engine.policy.batching.hashes_all else 0

    @cached_property
    def _again(self) -> int:
        """1 where the last page found is computed again, and so may end behind the limit; else 0."""
        fields: Any = self.engine.state[1].fields
        return int(fields["drops_page"][0]) if "drops_page" in fields.dtype.names else 0

    @property
    def _fixed(self) -> Any:
        return self.engine.state[0].fixed[0]

    def changes(self) -> tuple[list[int], list[int]]:
        """The named pages that came since the last call, and the pages whose last copy was evicted."""
        num = int(self._logged[0])
        came: list[int] = []
        gone: list[int] = []
        if not num:
            return came, gone
        assert num < len(self._log), "the log is full"
        self._logged[0] = 0
        for at, key, group, is_new in self._log[:num].tolist():
            if key < 0:
                continue
            name = key * (self.groups + 1) + group
            if is_new:
                self._entries.setdefault(name, []).append(at)
                came.append(name)
            else:
                copies = self._entries[name]
                copies.remove(at)
                if not copies:
                    del self._entries[name]
                    gone.append(name)
        return came, gone

    def names(self, request: int, tokens: int) -> npt.NDArray[np.int64]:
        """The names of a request's first pages, [pages, 1 + groups], as far as its `tokens` have names."""
        prefixes, size = self._prefixes, self.engine.page_size
        ends = np.arange(1, min(tokens, int(prefixes.named[request])) // size + 1) * size
        block = (ends - 1) // prefixes.block
        place = ends // size - 1 - block * prefixes.block // size
        per_block = -(-prefixes.block // size)
        keys = prefixes.of(request)[block] * per_block + place
        found: npt.NDArray[np.int64] = keys[:, None] * (self.groups + 1) + np.arange(self.groups + 1)
        return found

    def __contains__(self, page: object) -> bool:
        """Whether the cache had a page at the last call of `changes`."""
        return page in self._entries

    def pages(self, request: int) -> list[int]:
        """The pages of a request's prompt in layers without a window, as far as they have names."""
        return [row[0] for row in self._names_of(request)]

    def lookup(self, request: int, tiers: Container[int]) -> "Found":
        """The longest prefix of a request that the cache and the tiers have together."""
        engine, size, here = self.engine, self.engine.page_size, self._entries
        prompt = int(engine.table.asked.input_length[request])
        rows = self._names_of(request)
        alone, last = self._reach(rows, here, here), self._reach(rows, here, tiers)
        wanted = [row[0] for row in rows[:last]]
        if self.groups:
            first = int(_num_left(self._fixed, last * size))
            wanted += [row[group] for group in range(1, self.groups + 1) for row in rows[first:last]]
        cached = [name for name in wanted if name in here]
        lacking = [name for name in wanted if name not in here] if last > alone else []
        held = int((self._refs[[here[name][0] for name in cached]] > 0).sum()) if cached else 0
        pages = engine.pages_of(min(prompt, last * size + self.budget)) - held
        return Found(cached, lacking, pages, prompt - alone * size)

    def _names_of(self, request: int) -> list[list[int]]:
        """The names of a request's pages that its replica would reuse."""
        rows = self._rows.get(request)
        if rows is None:
            if len(self._rows) >= ROWS_KEPT:
                self._rows.clear()
            prompt, policy = int(self.engine.table.asked.input_length[request]), self.engine.policy
            names = self.names(request, policy.batching.most_reused(policy, prompt) + self._again)
            rows = self._rows[request] = names.tolist()
        return rows

    def _reach(self, rows: list[list[int]], here: Container[int], tiers: Container[int]) -> int:
        """Pages of the longest prefix that these have."""
        last = 0
        for row in rows:
            if row[0] not in here and row[0] not in tiers:
                break
            last += 1
        while self.groups and last > 0:
            first = int(_num_left(self._fixed, last * self.engine.page_size))
            lacking = [
                page for page in range(first, last)
                if any(name not in here and name not in tiers for name in rows[page][1:])
            ]  # fmt: skip
            if not lacking:
                break
            last = lacking[-1]
        return last

    @property
    def room(self) -> int:
        """Pages of the pool that no request holds."""
        return self.engine.limits.num_pages - self.engine.pages_held

    @property
    def budget(self) -> int:
        """Prompt tokens of a step."""
        return int(self._fixed.max_prefill)

    @property
    def may_admit(self) -> int:
        """The most requests that the next decision admits; 0 where it continues a group."""
        engine = self.engine
        counters = engine.counters[0]
        if counters["num_group"] >= 0:
            return 0
        return max(0, engine.limits.max_batch - engine.num_running)

    @property
    def decided_ahead(self) -> bool:
        """Whether the step after this one is decided: pages that came lately are computed later."""
        return bool(self.engine.counters[0]["next_kind"] != NOTHING)

    def pin(self, names: Iterable[int], coming: int) -> npt.NDArray[np.int64]:
        """Hold these pages, and room for `coming` more, until `unpin`; returns what that takes."""
        engine = self.engine
        entries = np.array([self._entries[name][0] for name in names], np.int64)
        engine.keep(coming)
        self._call("pin", entries)
        return entries

    def insert(self, names: list[int], pinned: npt.NDArray[np.int64]) -> None:
        """Put pages that were loaded into the room that was held for them, and hold nothing any more."""
        engine = self.engine
        engine.keep(-len(names))
        name = np.array(names, np.int64)
        self._call("insert", name // (self.groups + 1), name % (self.groups + 1))
        self._call("unpin", pinned)

    def _call(self, name: str, *arguments: npt.NDArray[np.int64]) -> None:
        engine = self.engine
        engine.core.of_cache(name, len(engine.table.rows))(*engine.state, *arguments)
