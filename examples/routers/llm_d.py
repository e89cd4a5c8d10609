"""llm-d's router: `--router ./examples/routers/llm_d.py:LlmD,prefix=2`.

The best weighted score of prefix, queue and KV use; llm-d router 520af478, with BLIS's default weights.
"""

from collections.abc import Sequence
from typing import Any

from dsim.fleet import PolicyError, ReplicaView, RequestView, Router, SentNames

MAX_TOKENS = 2**24  # remembered of each replica


class LlmD(Router):
    """The highest sum of weighted scores from 0 to 1; the first of equals.

    prefix: share of the prompt sent there. queue: 1 for the shortest, 0 for the longest. kv: free pages.
    """

    goes_by_prefix = True
    settings = {"prefix": float, "queue": float, "kv": float}  # noqa: RUF012

    def __init__(self, prefixes: Any = None, prefix: float = 2.0, queue: float = 1.0, kv: float = 1.0) -> None:
        super().__init__(prefixes)
        for name, value in (("prefix", prefix), ("queue", queue), ("kv", kv)):
            if not 0 <= value < float("inf"):
                raise PolicyError(f"{name} is {value}, expected at least 0 and finite")
        self._weights = prefix, queue, kv
        self._sent = None if prefixes is None else SentNames(prefixes, MAX_TOKENS)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        queues = [replica.num_waiting for replica in replicas]
        shortest, longest = min(queues), max(queues)
        scores = []
        for replica, queue in zip(replicas, queues, strict=True):
            known = 0 if self._sent is None else self._sent.known(replica.replica, request)
            parts = (
                min(1.0, known / max(1, request.input_length)),
                1.0 if longest == shortest else (longest - queue) / (longest - shortest),
                1.0 - replica.pages_held / replica.num_pages,
            )
            scores.append(sum(weight * part for weight, part in zip(self._weights, parts, strict=True)))
        chosen = scores.index(max(scores))
        if self._sent is not None:
            self._sent.add(replicas[chosen].replica, request)
        return chosen
