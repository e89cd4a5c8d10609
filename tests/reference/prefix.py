"""Oracle of prefix caching: vLLM's scheduler in plain Python over real tokens (production-dllm-serving.md 2.3).

One step after another, nothing decided ahead. A page is known by all tokens up to its end, a list keeps the idle ones.
"""

from collections import deque
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Row = tuple[int, int, int]  # request, positions computed, keys visible


@dataclass
class Asked:
    """A request: its prompt and the answer that it will be given."""

    prompt: Tokens
    answer: Tokens
    answer_is_known: bool  # whether pages of the answer may be found, too
    computed: int = 0
    known: int = 0  # tokens: the prompt, then the answer as it grows
    pages: int = 0
    shared: list[Tokens] = field(default_factory=list)  # of those pages, the first ones, which others may hold
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
    holders: dict[Tokens, int] = field(default_factory=dict)  # of each page that is there
    idle: list[Tokens] = field(default_factory=list)  # the one idle longest first
    evicted: list[Tokens] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    preempted: int = 0

    def submit(self, index: int, prompt: Tokens, answer: Tokens, answer_is_known: bool) -> None:
        self.requests[index] = Asked(prompt, answer, answer_is_known, known=len(prompt))
        self.waiting.append(index)

    @property
    def held(self) -> int:
        own = sum(r.pages - len(r.shared) for r in self.requests.values())
        return own + sum(count > 0 for count in self.holders.values())

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
            found = self._found(r)
            there = len(found) * self.page
            n = min(r.known - there, budget)
            free = self.num_pages - self.held + sum(self.holders[page] > 0 for page in found)
            if max(-(-(there + n) // self.page), -(-r.known // self.page)) > free:
                break
            self.waiting.popleft()
            for page in found:
                self._take(page)
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
            self.evicted.append(self.idle.pop(0))
            del self.holders[self.evicted[-1]]
        last = len(r.prompt) + len(r.answer) - 1
        for page in self._pages(r, min(r.computed, r.known, last))[len(r.shared) :]:
            self._take(page)
            r.shared.append(page)
        return n

    def _pages(self, r: Asked, tokens: int) -> list[Tokens]:
        """Of the full pages of the first tokens those that have a name: all tokens up to the end of it."""
        whole = r.prompt + r.answer if r.answer_is_known else r.prompt
        ends = range(self.page, min(tokens, len(whole)) + 1, self.page)
        return [(end, *whole[: -(-end // self.block) * self.block]) for end in ends]

    def _found(self, r: Asked) -> list[Tokens]:
        found: list[Tokens] = []
        for page in self._pages(r, r.known - 1):
            if page not in self.holders:
                break
            found.append(page)
        return found

    def _take(self, page: Tokens) -> None:
        if self.holders.get(page) == 0:
            self.idle.remove(page)
        self.holders[page] = self.holders.get(page, 0) + 1

    def _free(self, r: Asked) -> None:
        for page in reversed(r.shared):
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.idle.append(page)
        r.shared, r.pages = [], 0
