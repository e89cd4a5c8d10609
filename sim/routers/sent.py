"""A router's memory of prompts sent to each replica."""

import math
from collections import OrderedDict, defaultdict

from ...engine.prefix import Prefixes
from .router import RequestView


def num_remembered(prefixes: Prefixes, most_tokens: int) -> int:
    return max(1, most_tokens // prefixes.block)


class SentNames:
    """Blocks sent to each replica, the least recently used forgotten; ignores evictions.

    ttl: s after which a block not sent again is forgotten.
    """

    def __init__(self, prefixes: Prefixes, most_tokens: int, ttl: float = math.inf) -> None:
        self._ttl = ttl
        self._prefixes = prefixes
        self._most = num_remembered(prefixes, most_tokens)
        self._sent: defaultdict[int, OrderedDict[int, float]] = defaultdict(
            OrderedDict
        )  # and when, the least recently used first

    def _names(self, request: RequestView) -> list[int]:
        names = self._prefixes.of(request.index)[: -(-request.input_length // self._prefixes.block)]
        found: list[int] = names.tolist()
        return found

    def known(self, replica: int, request: RequestView) -> int:
        """First tokens of a prompt that a replica was sent."""
        names, held = self._names(request), self._sent[replica]
        since = request.arrival - self._ttl
        known = (i for i, name in enumerate(names) if held.get(name, -math.inf) < since or name not in held)
        return next(known, len(names)) * self._prefixes.block

    def add(self, replica: int, request: RequestView) -> None:
        held = self._sent[replica]
        for name in reversed(self._names(request)):  # a prefix outlives what follows it
            held[name] = request.arrival
            held.move_to_end(name)
        while len(held) > self._most:
            held.popitem(last=False)
