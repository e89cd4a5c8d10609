"""What a step costs: the pure evaluation of a latency model on the features of a step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Features(NamedTuple):
    """What a step's cost depends on, whatever policy made it."""

    tokens: int  # query positions through the layers
    sum_q_kv: int  # sum over rows of query positions x visible keys
    sum_kv: int  # sum over rows of visible keys
    head_rows: int  # rows through the LM head
    sampled_rows: int  # rows through soft-max and sampling
    batch: int  # rows
    prefill_tokens: int  # of `tokens`, those of prompts being prefilled
    num_forwards: int = 1  # forwards the step is split into (a long prompt's chunks)


@dataclass(frozen=True)
class LatencyModel:
    """A step's latency, in seconds, as the sum of what the host and the device do.

    device  = pieces(tokens) + attention * sum_q_kv + kv_read * sum_kv + head * head_rows + sample * sampled_rows
    latency = max(launch, device) + host_step + host_request * batch

    `pieces` is affine between the knots (tokens, seconds) and has slope `slope` (s/token) beyond the last:
    memory-bound, transition and compute-bound (Optimus, section 5.2). `launch` is the host time to enqueue one
    forward, hidden whenever the device is slower: it is the floor that binds in an eager implementation.
    A step of several forwards pays pieces, launch and host_step once for each.
    """

    knots: tuple[tuple[float, float], ...]
    slope: float
    attention: float = 0.0  # s per query-key pair, all layers
    kv_read: float = 0.0  # s per visible key, all layers
    head: float = 0.0  # s per row of the LM head
    sample: float = 0.0  # s per row of soft-max and sampling
    launch: float = 0.0  # s per forward
    host_step: float = 0.0  # s per forward, never hidden
    host_request: float = 0.0  # s per row, never hidden

    def pieces(self, tokens: float) -> float:
        """Device time of the layers for `tokens` positions, in seconds."""
        (x0, y0) = self.knots[0]
        if tokens <= x0:
            return y0
        for x1, y1 in self.knots[1:]:
            if tokens <= x1:
                return y0 + (y1 - y0) * ((tokens - x0) / (x1 - x0))
            x0, y0 = x1, y1
        return y0 + self.slope * (tokens - x0)

    def step(self, f: Features) -> float:
        """The latency of a step, in seconds."""
        n = f.num_forwards
        device = (
            n * self.pieces(f.tokens / n)
            + self.attention * f.sum_q_kv
            + self.kv_read * f.sum_kv
            + self.head * f.head_rows
            + self.sample * f.sampled_rows
        )
        return max(n * self.launch, device) + n * self.host_step + self.host_request * f.batch

    def of_tokens(self, tokens: npt.ArrayLike, batch: int) -> npt.NDArray[np.float64]:
        """T(x) with attention ignored, as Optimus's selection uses it (section 5.1): every token is a head row."""
        out = [self.step(Features(int(x), 0, 0, int(x), int(x), batch, 0)) for x in np.asarray(tokens).ravel()]
        return np.array(out, dtype=np.float64)
