"""What a step costs: the pure evaluation of a latency model on the features of a step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

POWERS_TO = 256  # tokens: captured graphs come in powers of two up to here, then in multiples of it


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


def bucket(num: int) -> int:
    """The least captured size that holds `num` tokens: a power of two up to 256, then a multiple of 256."""
    if num <= POWERS_TO:
        return 1 << max(0, num - 1).bit_length()
    return -(-num // POWERS_TO) * POWERS_TO


def padded(f: Features) -> Features:
    """What a captured decode step computes: rows of nothing fill its bucket, and each costs the layers and the head."""
    more = bucket(f.tokens) - f.tokens
    return f._replace(tokens=f.tokens + more, head_rows=f.head_rows + more, sampled_rows=f.sampled_rows + more)


@dataclass(frozen=True)
class Upkeep:
    """What a row in this phase of a full-sequence cache costs beyond its features (engine/upkeep.py)."""

    cache: str  # its kind, such as SparseCache
    phase: str  # such as pack
    row: float  # s
    token: float  # s a token of the request's prompt and canvas


@dataclass(frozen=True)
class LatencyModel:
    """A step's latency, in seconds, as the sum of what the host and the device do.

    layers  = pieces(tokens) + attention * sum_q_kv + kv_read * sum_kv
    device  = layers + head * head_rows + sample * sampled_rows
    latency = max(launch, device) + host_step + host_request * batch

    `pieces` is affine between the knots (tokens, seconds) and has slope `slope` (s/token) beyond the last:
    memory-bound, transition and compute-bound (Optimus, section 5.2). `launch` is the host time to enqueue one
    forward, hidden whenever the device is slower: it is the floor that binds in an eager implementation.
    A step of several forwards pays pieces, launch and host_step once for each.

    Where positions are evicted on the way, a share `early` of the layers computes what was planned and the rest what
    was left; choosing takes `eviction` more, for the host waits for the choice. Decode steps of at most `graph_tokens`
    that evict nothing are captured graphs: their tokens and rows are padded to a bucket, and they have no launch.
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
    early: float = 0.0  # of the layers' work, the share that comes before an eviction
    eviction: float = 0.0  # s per step that evicts, never hidden: scores, choice, compaction, waiting for their outcome
    graph_tokens: int = 0  # 0: nothing is captured
    upkeep: tuple[Upkeep, ...] = ()  # of full-sequence caches; their steps cost it on top of the latency above

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

    def step(self, f: Features, left: Features | None = None) -> float:
        """The latency of a step, in seconds; `left`: what remains of it after an eviction."""
        n, launch = f.num_forwards, self.launch
        if left is None:
            if f.prefill_tokens == 0 and 0 < f.tokens <= self.graph_tokens:
                f, launch = padded(f), 0.0
            layers = self._layers(f)
        else:
            layers = self.early * self._layers(f) + (1.0 - self.early) * self._layers(left)
            f = left
        device = layers + self.head * f.head_rows + self.sample * f.sampled_rows
        latency = max(n * launch, device) + n * self.host_step + self.host_request * f.batch
        return latency if left is None else latency + self.eviction

    def _layers(self, f: Features) -> float:
        n = f.num_forwards
        return n * self.pieces(f.tokens / n) + self.attention * f.sum_q_kv + self.kv_read * f.sum_kv

    def of_tokens(self, tokens: npt.ArrayLike, batch: int) -> npt.NDArray[np.float64]:
        """T(x) with attention ignored, as Optimus's selection uses it (section 5.1): every token is a head row."""
        out = [self.step(Features(int(x), 0, 0, int(x), int(x), batch, 0)) for x in np.asarray(tokens).ravel()]
        return np.array(out, dtype=np.float64)
