"""Least tokens: the replica with the least work left."""

from collections.abc import Sequence

import numpy as np

from .router import ReplicaView, RequestView, Router, figures


class LeastTokens(Router):
    """The replica with the fewest tokens to prefill or expected to be returned; the first of equals."""

    goes_by_length = True

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return int(np.argmin(figures(replicas, "expected_tokens")))
