"""Longest prefix: the replica that was sent most of the prompt's beginning (SGLang's cache-aware router).

sgl-model-gateway/src/main.rs and policies/cache_aware.rs, with its command line's settings.
"""

from collections.abc import Sequence

from ...engine.errors import PolicyError
from ...engine.prefix import Prefixes
from .router import ReplicaView, RequestView, Router
from .sent import SentNames

CACHE_THRESHOLD = 0.3  # share of the prompt that a replica must have been sent
BALANCE_ABS_THRESHOLD = 64  # requests between the longest queue and the shortest
BALANCE_REL_THRESHOLD = 1.5  # ratio of the longest queue to the shortest
MAX_TREE_TOKENS = 2**26 // 4  # remembered of each replica; SGLang counts characters, four to a token


class LongestPrefix(Router):
    """The replica that was sent most of the prompt's beginning, evictions ignored.

    While queues differ by more than both thresholds it joins the shortest. If none was sent enough, and among equals,
    the fewest expected tokens win (SGLang: the fewest remembered).
    """

    goes_by_prefix = True

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        super().__init__(prefixes)
        if prefixes is None:
            raise PolicyError("router is prefix, and the requests have no known prefixes: expected a trace")
        self._sent = SentNames(prefixes, MAX_TREE_TOKENS)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        queues = [replica.num_waiting + replica.num_running for replica in replicas]
        shortest, longest = min(queues), max(queues)
        if longest - shortest > BALANCE_ABS_THRESHOLD and longest > BALANCE_REL_THRESHOLD * shortest:
            chosen = queues.index(shortest)
        else:
            lengths = [self._sent.known(replica.replica, request) for replica in replicas]
            equals = list(range(len(replicas)))
            if max(lengths) > CACHE_THRESHOLD * request.input_length:
                equals = [i for i in equals if lengths[i] == max(lengths)]
            chosen = min(equals, key=lambda i: replicas[i].expected_tokens)
        self._sent.add(replicas[chosen].replica, request)
        return chosen
