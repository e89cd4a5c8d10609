"""Oracle of prefix caching: vLLM's scheduler in plain Python over real tokens (production-dllm-serving.md 2.3).

One step after another, nothing decided ahead. A page is known by all tokens up to its end, or by its request where
those have no name. Two requests that compute the same page hold one each; a third finds the older. A list keeps the
idle ones.
"""

from collections import deque
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Row = tuple[int, int, int]  # request, positions computed, keys visible


Key = tuple[int | Tokens, ...]


@dataclass(eq=False)
class Page:
    """A full page of the pool."""

    key: Key
    holders: int = 1


@dataclass
class Asked:
    """A request: its prompt and the answer that it will be given."""

    prompt: Tokens
    answer: Tokens
    answer_is_known: bool  # whether pages of the answer may be found, too
    computed: int = 0
    known: int = 0  # tokens: the prompt, then the answer as it grows
    pages: int = 0
    shared: list[Page] = field(default_factory=list)  # of those pages, the first ones, which others may hold
    cached: int | None = None  # tokens found when it was first let in


@dataclass
class Scheduler:
    """A replica; what names of `block` tokens cannot tell apart is not shared."""

    budget: int
    page: int
    num_pages: int
    max_num_seqs: int
    block: int
    requests: dict[int, Asked] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)
    there: dict[Key, list[Page]] = field(default_factory=dict)  # of each key the pages that are there, the oldest first
    idle: list[Page] = field(default_factory=list)  # the one idle longest first
    evicted: list[Page] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    preempted: int = 0

    def submit(self, index: int, prompt: Tokens, answer: Tokens, answer_is_known: bool) -> None:
        self.requests[index] = Asked(prompt, answer, answer_is_known, known=len(prompt))
        self.waiting.append(index)

    @property
    def held(self) -> int:
        own = sum(r.pages - len(r.shared) for r in self.requests.values())
        return own + sum(page.holders > 0 for pages in self.there.values() for page in pages)

    def schedule(self) -> list[Row]:
        budget, self.rows, before = self.budget, [], self.preempted
        i = 0
        while i < len(self.running) and budget > 0:
            index = self.running[i]
            i += 1
            r = self.requests[index]
            n = min(r.known - r.computed, budget)
            needed = max(r.pages, -(-(r.computed + n) // self.page))
            while index in self.running and needed - r.pages > self.num_pages - self.held:
                last = self.running.pop()
                self._free(self.requests[last])
                self.requests[last].computed = 0
                self.waiting.appendleft(last)
                self.preempted += 1
            if index not in self.running:
                break
            r.pages = needed
            budget -= self._run(index, n)
        while self.preempted == before and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            index = self.waiting[0]
            r = self.requests[index]
            found = self._found(index)
            there = len(found) * self.page
            n = min(r.known - there, budget)
            free = self.num_pages - self.held + sum(page.holders > 0 for page in found)
            if max(-(-(there + n) // self.page), -(-r.known // self.page)) > free:
                break
            self.waiting.popleft()
            for page in found:
                if page.holders == 0:
                    self.idle.remove(page)
                page.holders += 1
            r.shared, r.computed, r.pages = found, there, -(-(there + n) // self.page)
            r.cached = there if r.cached is None else r.cached
            self.running.append(index)
            budget -= self._run(index, n)
        return self.rows

    def finish_step(self) -> None:
        for index, _, keys in self.rows:
            r = self.requests[index]
            if keys < r.known:
                continue
            r.known += 1
            if r.known == len(r.prompt) + len(r.answer):
                self.running.remove(index)
        for index, _, _ in self.rows:
            if index not in self.running:
                self._free(self.requests[index])

    def _run(self, index: int, n: int) -> int:
        r = self.requests[index]
        r.computed += n
        self.rows.append((index, n, r.computed))
        while self.held + len(self.idle) > self.num_pages:
            page = self.idle.pop(0)
            self.evicted.append(page)
            self.there[page.key].remove(page)
        for key in self._keys(index, min(r.computed, r.known))[len(r.shared) :]:
            r.shared.append(Page(key))
            self.there.setdefault(key, []).append(r.shared[-1])
        return n

    def _keys(self, index: int, tokens: int) -> list[Key]:
        """The keys of the full pages of a request's first tokens: all tokens up to the end of a page's name."""
        r = self.requests[index]
        whole = r.prompt + r.answer if r.answer_is_known else r.prompt
        ends = range(self.page, tokens + 1, self.page)
        named = [(end, whole[: -(-end // self.block) * self.block]) for end in ends if end <= len(whole)]
        return [*named, *((end, (), index) for end in ends[len(named) :])]

    def _found(self, index: int) -> list[Page]:
        found: list[Page] = []
        for key in self._keys(index, self.requests[index].known - 1):
            if not self.there.get(key):
                break
            found.append(self.there[key][0])
        return found

    def _free(self, r: Asked) -> None:
        for page in reversed(r.shared):
            page.holders -= 1
            if page.holders == 0:
                self.idle.append(page)
        r.shared, r.pages = [], 0
