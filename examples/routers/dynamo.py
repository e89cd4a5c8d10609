"""Dynamo's router: `--router ./examples/routers/dynamo.py:Dynamo,temperature=0.5`.

The least cost in prompt blocks to prefill and blocks that decode. Fields have the names and defaults of Dynamo 1.6.1
(kv_router_args.py) but for `ttl`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsim.fleet import PolicyError, ReplicaView, RequestView, Router, SentNames

MAX_TOKENS = 2**24  # remembered of each replica
_PURPOSE = 0xD1A0  # one stream of draws


class Dynamo(Router):
    """prefill_load_scale x (prompt blocks queued + the prompt's - credits) + blocks held + requests x weight.

    Blocks are KV pages. The router remembers what it sent, as Dynamo without events (router_ttl_secs: 120; here `ttl`,
    without end). Above temperature 0 it draws by a softmax of the costs over their range.
    """

    goes_by_prefix = True
    settings = {  # noqa: RUF012
        "prefill_load_scale": float, "request_weight": float, "overlap_score_credit": float,
        "temperature": float, "ttl": float,
    }  # fmt: skip

    def __init__(
        self,
        prefixes: Any = None,
        prefill_load_scale: float = 1.0,
        request_weight: float = 0.0,
        overlap_score_credit: float = 1.0,
        temperature: float = 0.0,
        ttl: float = math.inf,
    ) -> None:
        super().__init__(prefixes)
        checked = {
            "prefill_load_scale": prefill_load_scale, "request_weight": request_weight,
            "overlap_score_credit": overlap_score_credit, "temperature": temperature,
        }  # fmt: skip
        for name, value in checked.items():
            if not 0 <= value < math.inf:
                raise PolicyError(f"{name} is {value}, expected at least 0 and finite")
        if not ttl > 0:
            raise PolicyError(f"ttl is {ttl} s, expected above 0")
        self._scale, self._weight, self._credit = prefill_load_scale, request_weight, overlap_score_credit
        self._temperature = temperature
        self._sent = None if prefixes is None else SentNames(prefixes, MAX_TOKENS, ttl)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        costs = [self._cost(replica, request) for replica in replicas]
        chosen = costs.index(min(costs)) if self._temperature == 0 else self._drawn(costs, request)
        if self._sent is not None:
            self._sent.add(replicas[chosen].replica, request)
        return chosen

    def _cost(self, replica: ReplicaView, request: RequestView) -> float:
        sent = 0 if self._sent is None else self._sent.known(replica.replica, request)
        uncached = max(0.0, request.input_length - self._credit * sent)
        prompts = (replica.queued_prompt_tokens + uncached) / replica.page_size
        requests = replica.num_waiting + replica.num_running
        return self._scale * prompts + replica.pages_held + self._weight * requests

    def _drawn(self, costs: Sequence[float], request: RequestView) -> int:
        """Drawn with probability ~ exp(-cost / range / temperature), one draw a request."""
        spread = max(costs) - min(costs) or 1.0
        weights = np.exp(-(np.array(costs) - min(costs)) / spread / self._temperature)
        draw = np.random.default_rng([_PURPOSE, request.index]).random() * weights.sum()
        return min(int(np.searchsorted(weights.cumsum(), draw, side="right")), len(costs) - 1)
