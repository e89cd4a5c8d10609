"""A router's memory of the prompts that it sent to each replica."""

from collections import OrderedDict, defaultdict

from ...engine.prefix import Prefixes
from .router import RequestView


class Sent:
    """The blocks sent to each replica, the least recently used forgotten; it ignores evictions."""

    def __init__(self, prefixes: Prefixes, most_tokens: int) -> None:
        self._prefixes = prefixes
        self._most = max(1, most_tokens // prefixes.block)  # names remembered of each replica
        self._sent: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)  # least recently used first

    def _names(self, request: RequestView) -> list[int]:
        names = self._prefixes.of(request.index)[: -(-request.input_length // self._prefixes.block)]
        found: list[int] = names.tolist()
        return found

    def known(self, replica: int, request: RequestView) -> int:
        """Tokens of a prompt's beginning that a replica was sent."""
        names, held = self._names(request), self._sent[replica]
        return next((i for i, name in enumerate(names) if name not in held), len(names)) * self._prefixes.block

    def add(self, replica: int, request: RequestView) -> None:
        """Note that a prompt is sent to a replica."""
        held = self._sent[replica]
        for name in reversed(self._names(request)):  # a prefix outlives what follows it
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._most:
            held.popitem(last=False)
