"""A router's memory of prompts sent to each replica."""

from collections import OrderedDict, defaultdict
from itertools import takewhile

from ...engine.prefix import Prefixes
from .router import RequestView


class SentNames:
    """Blocks sent to each replica, the least recently used forgotten; ignores evictions."""

    def __init__(self, prefixes: Prefixes, most_tokens: int) -> None:
        self._prefixes = prefixes
        self._most = max(1, most_tokens // prefixes.block)
        self._sent: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)  # by replica

    def _names(self, request: RequestView) -> list[int]:
        num_blocks = -(-request.input_length // self._prefixes.block)
        names: list[int] = self._prefixes.of(request.index)[:num_blocks].tolist()
        return names

    def known(self, replica: int, request: RequestView) -> int:
        """First tokens of a prompt that a replica was sent."""
        sent = self._sent[replica]
        names = takewhile(sent.__contains__, self._names(request))
        return sum(1 for _ in names) * self._prefixes.block

    def add(self, replica: int, request: RequestView) -> None:
        sent = self._sent[replica]
        for name in reversed(self._names(request)):  # a prefix outlives what follows it
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self._most:
            sent.popitem(last=False)
