"""A router's memory of prompts sent to each replica."""

import math
from collections import OrderedDict, defaultdict

from ...engine.prefix import Prefixes
from .router import RequestView


class SentNames:
    """Blocks sent to each replica, the least recently used forgotten; ignores evictions.

    ttl: s after which a block not sent again is forgotten.
    """

    def __init__(self, prefixes: Prefixes, most_tokens: int, ttl: float = math.inf) -> None:
        self._ttl = ttl
        self._prefixes = prefixes
        self._most = max(1, most_tokens // prefixes.block)
        # By replica: when each block was sent, the least recently used first.
        self._sent: defaultdict[int, OrderedDict[int, float]] = defaultdict(OrderedDict)

    def _names(self, request: RequestView) -> list[int]:
        num_blocks = -(-request.input_length // self._prefixes.block)
        names: list[int] = self._prefixes.of(request.index)[:num_blocks].tolist()
        return names

    def known(self, replica: int, request: RequestView) -> int:
        """First tokens of a prompt that a replica was sent."""
        num, times = 0, self._sent[replica]
        since = request.arrival - self._ttl
        for name in self._names(request):
            if name not in times or times[name] < since:
                break
            num += 1
        return num * self._prefixes.block

    def add(self, replica: int, request: RequestView) -> None:
        times = self._sent[replica]
        for name in reversed(self._names(request)):  # a prefix outlives what follows it
            times[name] = request.arrival
            times.move_to_end(name)
        while len(times) > self._most:
            times.popitem(last=False)
