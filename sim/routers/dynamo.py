"""Dynamo's router: the replica of the least cost, prompt blocks to prefill and blocks that decode.

Source: Dynamo 1.6.1, kv_router_args.py (fleet.md 4), at a temperature of 0.
"""

from collections.abc import Sequence

from ...engine.errors import PolicyError
from ...engine.prefix import Prefixes
from .router import ReplicaView, RequestView, Router
from .sent import Sent

MAX_TOKENS = 2**24  # remembered of each replica


class Dynamo(Router):
    """prefill_load_scale x (prompt blocks queued + the prompt's that are not cached) + blocks held + requests x weight.

    Blocks are KV pages. A replica has in its cache what it was sent, if it caches prefixes.
    """

    goes_by_prefix = True
    settings = {"prefill_load_scale": float, "request_weight": float}  # noqa: RUF012

    def __init__(
        self, prefixes: Prefixes | None = None, prefill_load_scale: float = 1.0, request_weight: float = 0.0
    ) -> None:
        super().__init__(prefixes)
        for name, value in (("prefill_load_scale", prefill_load_scale), ("request_weight", request_weight)):
            if not 0 <= value < float("inf"):
                raise PolicyError(f"{name} is {value}, expected at least 0 and finite")
        self._scale, self._weight = prefill_load_scale, request_weight
        self._sent = None if prefixes is None else Sent(prefixes, MAX_TOKENS)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        costs = [self._cost(replica, request) for replica in replicas]
        chosen = costs.index(min(costs))
        if self._sent is not None:
            self._sent.add(replicas[chosen].replica, request)
        return chosen

    def _cost(self, replica: ReplicaView, request: RequestView) -> float:
        known = 0 if self._sent is None else self._sent.known(replica.replica, request)
        prompts = (replica.queued_prompt_tokens + max(0, request.input_length - known)) / replica.page_size
        requests = replica.num_waiting + replica.num_running
        return self._scale * prompts + replica.pages_held + self._weight * requests
