"""A replica's prefix cache as lower KV tiers see it: its pages, and room for loaded ones.

A page's name is a number for its key (prefix.py) and group of layers. Other requests can find only named pages, so
tiers hold no others.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .errors import PolicyError
from .jit import plain
from .prefix import Prefixes
from .state import NOTHING
from .windows import num_left, window_groups

ROWS_KEPT = 256  # requests
_num_left, _window_groups = plain(num_left), plain(window_groups)


class Found(NamedTuple):
    """What exists of a request's prefix."""

    cached: list[int]  # pages
    lacking: list[int]  # pages only in a tier, in order
    pages: int  # for the request's first step with the whole prefix
    uncached: int  # prompt tokens not in the cache


class Change(NamedTuple):
    """A tier's change to a replica, or a decision without effect, for a journal."""

    what: str  # defer, put_back, pin, insert, or ask: a decision that found nothing
    step: int  # steps planned before
    in_step: bool  # while the last one ran
    submitted: int  # requests submitted before
    request: int = -1  # -1: none
    time: float = 0.0  # s
    pages: tuple[int, ...] = ()  # names
    coming: int = 0  # pages of room held in addition


class Offload:
    """An engine's prefix cache, followed from decision to decision.

    before_step: as in Engine.watch. log: receives changes to the engine, timed by `clock`.
    """

    def __init__(
        self, engine: Engine, prefixes: Prefixes, before_step: Callable[[float], None],
        log: list[Change] | None = None, clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._log_to, self._clock = log, clock
        self._asked: Change | None = None  # the last decision, until it produces a step
        engine.watch(before_step)
        cache: Any = engine.prefix_cache
        self._log, self._logged, self._refs = cache.log, np.asarray(cache.pool["logged"]), cache.entries["refs"]
        self._prefixes = prefixes
        self._rows: dict[int, list[list[int]]] = {}  # names of recently looked-up requests
        self._entries: dict[int, list[int]] = {}  # name -> entries, oldest first

    @cached_property
    def groups(self) -> int:
        """Groups of layers with a window that share pages on their own."""
        return int(_window_groups(self._fixed)) if self.engine.policy.batching.hashes_all else 0

    @cached_property
    def _again(self) -> int:
        """1 if the last page found is computed again, and so may end beyond the limit; else 0."""
        fields: Any = self.engine.state[1].fields
        return int(fields["drops_page"][0]) if "drops_page" in fields.dtype.names else 0

    @property
    def _fixed(self) -> Any:
        return self.engine.state[0].fixed[0]

    def changes(self) -> tuple[list[int], list[int]]:
        """Named pages that came since the last call, and those whose last copy went."""
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
        """Names of a request's first pages up to `tokens`, [pages, 1 + groups]."""
        prefixes, size = self._prefixes, self.engine.page_size
        ends = np.arange(1, min(tokens, int(prefixes.named[request])) // size + 1) * size
        block = (ends - 1) // prefixes.block
        place = ends // size - 1 - block * prefixes.block // size
        per_block = -(-prefixes.block // size)
        keys = prefixes.of(request)[block] * per_block + place
        found: npt.NDArray[np.int64] = keys[:, None] * (self.groups + 1) + np.arange(self.groups + 1)
        return found

    def __contains__(self, page: object) -> bool:
        """Whether the cache had a page at the last `changes`."""
        return page in self._entries

    def pages(self, request: int) -> list[int]:
        """Names of a prompt's pages in layers without a window."""
        return [row[0] for row in self._names_of(request)]

    def lookup(self, request: int, tiers: Container[int]) -> "Found":
        """The longest prefix of a request in cache and tiers together."""
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
        """Names of pages that the replica would reuse for a request."""
        rows = self._rows.get(request)
        if rows is None:
            if len(self._rows) >= ROWS_KEPT:
                self._rows.clear()
            prompt, policy = int(self.engine.table.asked.input_length[request]), self.engine.policy
            names = self.names(request, policy.batching.most_reused(policy, prompt) + self._again)
            rows = self._rows[request] = names.tolist()
        return rows

    def _reach(self, rows: list[list[int]], here: Container[int], tiers: Container[int]) -> int:
        """Pages of the longest prefix in cache and tiers together."""
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
        """Pages that no request holds."""
        return self.engine.limits.num_pages - self.engine.pages_held

    @property
    def budget(self) -> int:
        """Most prompt tokens of a step."""
        return int(self._fixed.max_prefill)

    @property
    def may_admit(self) -> int:
        """Most requests that the next decision admits; 0 if it continues a group."""
        engine = self.engine
        counters = engine.counters[0]
        if counters["num_group"] >= 0:
            return 0
        return max(0, engine.limits.max_batch - engine.num_running)

    @property
    def decided_ahead(self) -> bool:
        """Whether the next step is decided: new pages miss it."""
        return bool(self.engine.counters[0]["next_kind"] != NOTHING)

    def defer(self, request: int) -> None:
        self._note("defer", request)
        self.engine.defer(request)

    def put_back(self, request: int) -> None:
        self._note("put_back", request)
        self.engine.put_back(request)

    def decides(self, now: float) -> None:
        """Note a decision at `now` (s), after all earlier tier work."""
        if self._log_to is not None and self.engine.counters[0]["kind"] == NOTHING:
            asked = self._change("ask", time=now)
            self._flush(asked.step)
            self._asked = asked

    def _note(self, what: str, request: int, pages: Iterable[int] = (), coming: int = 0) -> None:
        if self._log_to is not None:
            change = self._change(what, request, pages=tuple(pages), coming=coming, time=self._clock())
            self._flush(change.step)
            self._log_to.append(change)

    def _flush(self, step: int) -> None:
        """Log the last decision if it produced no step."""
        if self._asked is not None and self._asked.step == step and self._log_to is not None:
            self._log_to.append(self._asked)
        self._asked = None

    def _change(self, what: str, request: int = -1, **more: Any) -> Change:
        counters = self.engine.counters[0]
        step, in_step = int(counters["num_steps"]), bool(counters["kind"] != NOTHING)
        return Change(what, step, in_step, self.engine.submitted, request, **more)

    def pin(self, request: int, names: Iterable[int], coming: int) -> npt.NDArray[np.int64]:
        """Hold pages for a request, and room for `coming` more, until `insert`, which takes the result."""
        engine, names = self.engine, list(names)
        self._note("pin", request, names, coming)
        entries = np.array([self._entries[name][0] for name in names], np.int64)
        engine.keep(coming)
        engine.call_cache("pin", entries)
        return entries

    def insert(self, request: int, names: Sequence[int], pinned: npt.NDArray[np.int64]) -> None:
        """Put loaded pages into their room; unpin the held ones."""
        engine = self.engine
        self._note("insert", request, names)
        engine.keep(-len(names))
        name = np.array(names, np.int64)
        engine.call_cache("insert", name // (self.groups + 1), name % (self.groups + 1))
        engine.call_cache("unpin", pinned)


class Reenacted:
    """Applies tiers' changes to a fresh engine, in order."""

    def __init__(self, engine: Engine, prefixes: Prefixes, changes: Sequence[Change]) -> None:
        self._engine = engine
        self._offload = Offload(engine, prefixes, lambda now: None)
        self._changes = list(reversed(changes))
        self._pinned: dict[int, npt.NDArray[np.int64]] = {}

    def until(
        self, step: int, in_step: bool, submit: Callable[[int], Iterable[str]],
        before: Callable[[int, float, bool], None],
    ) -> Iterator[str]:  # fmt: skip
        """Apply the changes up to a step: before its plan, or while it ran.

        submit: submits requests up to a number. before: called before each change between steps with the next step, the
        time (s), and whether it is a decision without effect. Yields a line on the first difference.
        """
        self._offload.changes()
        while self._changes and (self._changes[-1].step, not self._changes[-1].in_step) <= (step, not in_step):
            change = self._changes.pop()
            yield from submit(change.submitted)
            if not change.in_step:
                before(change.step, change.time, change.what == "ask")
            lines = list(self._make(change))
            yield from lines
            if lines:  # from here on the engine's state differs
                return

    def _make(self, change: Change) -> Iterator[str]:
        engine, offload, request = self._engine, self._offload, change.request
        offload.changes()
        if change.what == "ask":
            try:
                waits = engine.schedule(change.time) is None
            except PolicyError as error:  # requests that no step will ever serve
                yield str(error)
                return
            if not waits:
                yield f"replica {engine.replica}: the journal waits at {change.time:g} s, the engine has work"
        elif change.what == "pin":
            lacking = [page for page in change.pages if page not in offload]
            if lacking:
                yield f"request {request}: the journal finds {len(lacking)} pages that the engine's cache lacks"
            else:
                self._pinned[request] = offload.pin(request, change.pages, change.coming)
        elif change.what == "insert":
            if request in self._pinned:
                offload.insert(request, change.pages, self._pinned.pop(request))
        elif change.what == "defer":
            if all(request != waiting for waiting, _ in engine.waiting(engine.num_waiting)):
                yield f"request {request}: the journal defers it, the engine does not queue it"
            else:
                offload.defer(request)
        elif request in engine.deferred:
            offload.put_back(request)
        else:
            yield f"request {request}: the journal puts it back, the engine had not deferred it"
