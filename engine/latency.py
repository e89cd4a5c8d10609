"""The latency of a step: a latency model applied to the step's features."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .jit import plain, rule
from .plain import Share
from .records import F8, I8, Bool, Record, Table, columns_of, table
from .state import COUNTERS, DECODE_STEP, MASKED, Counters, Marks, Replica, Status, step_slots

_AT_ONCE = 4096  # steps
DERIVED = {"stored": False}  # a field that a profile takes from its model
# A step's terms: moved bytes, products, and the host's (`sequence` is in part the decoder's loop over rows).
BYTES = ("kv_read", "window_kv_read", "prompt_kv_read", "sample", "walk", "window_walk", "eviction")
PRODUCTS = (
    "slope", "attention", "dense_attention", "window_attention", "window_dense_attention", "prompt_attention", "head",
)  # fmt: skip
HOST = ("launch", "host_step", "host_request", "host_block", "sequence")
POWERS_TO = 256  # captured sizes: powers of two up to here, then multiples


class Features(NamedTuple):
    """Features of a step that determine its cost."""

    tokens: int  # query positions through the layers
    sum_q_kv: int  # over rows: query positions x visible keys
    sum_kv: int  # over rows: visible keys
    head_rows: int  # rows through the LM head
    sampled_rows: int  # rows through soft-max and sampling
    batch: int  # rows
    prefill_tokens: int  # prompts' share of `tokens`
    num_forwards: int = 1  # a long prompt's chunks
    window_q_kv: int = 0  # sum_q_kv in a layer with a window; 0: none
    window_kv: int = 0  # sum_kv in such a layer

    @property
    def continues(self) -> bool:
        """Whether the host planned it with the previous step."""
        return False


class Continued(Features):
    """Features of a step planned with the previous one."""

    @property
    def continues(self) -> bool:
        return True


Knots: TypeAlias = "npt.NDArray[np.float64] | tuple[tuple[float, float], ...]"  # (tokens, s)
StepFeatures: TypeAlias = "Features | Counters"  # of a plan, or of the step in flight
StepPrices: TypeAlias = "Prices | LatencyModel"


@rule
def _bucket(num: int) -> int:
    """Smallest captured size for `num` tokens."""
    size = 1
    if num <= POWERS_TO:
        while size < num:
            size *= 2
        return size
    return -(-num // POWERS_TO) * POWERS_TO


@rule
def _filled(num: int) -> int:
    return _bucket(num) if num > 0 else 0


@rule
def _pieces(knots: Knots, slope: float, tokens: float, first: int, end: int) -> float:
    """The layers' time by knots `first` to `end` (s)."""
    x0, y0 = knots[first][0], knots[first][1]
    if tokens <= x0:
        return y0
    for k in range(first + 1, end):
        x1, y1 = knots[k][0], knots[k][1]
        if tokens <= x1:
            return y0 + (y1 - y0) * ((tokens - x0) / (x1 - x0))
        x0, y0 = x1, y1
    return y0 + slope * (tokens - x0)


@rule
def _attends(cost: StepPrices, first: float, dense: float, qk_pairs: float, keys: float) -> float:
    """Time of query-key pairs: `first` each for a key's first `dense_from` queries, then `dense`."""
    if cost.dense_from == 0:
        return first * qk_pairs
    short = min(qk_pairs, cost.dense_from * keys)
    return first * short + dense * (qk_pairs - short)


@rule
def _layers(
    knots: Knots, cost: StepPrices, tokens: float, qk_pairs: float, keys: float, num_forwards: int, captured: bool,
    dense: bool,
) -> float:  # fmt: skip
    """The layers' time; captured: in a captured graph; dense: prompts alone."""
    first, end = 0, int(cost.num_knots)
    if captured and len(knots) > end:  # captured steps' own knots come last
        first, end = end, len(knots)
    pieces = num_forwards * _pieces(knots, cost.slope, tokens / num_forwards, first, end)
    if not cost.larger:
        return pieces + _attends(cost, cost.attention, cost.dense_attention, qk_pairs, keys) + cost.kv_read * keys
    if dense:
        return pieces + max(cost.prompt_attention * qk_pairs, cost.prompt_kv_read * keys)
    return pieces + max(cost.attention * qk_pairs, cost.kv_read * keys)


@rule
def window_pairs(tokens: int, keys: int, window: int, causal: bool) -> int:
    """Query-key pairs of a row in a layer with a window; its `tokens` queries are the last of `keys` tokens.

    Causal queries see the last `window` tokens; others see each other and `window` tokens before the first.
    """
    if not causal:
        return tokens * min(keys, window + tokens)
    before = keys - tokens
    short = min(max(window - before, 0), tokens)  # queries with fewer than `window` tokens before them
    return short * before + short * (short + 1) // 2 + (tokens - short) * window


@rule
def _windows(cost: StepPrices, features: StepFeatures) -> float:
    pairs = _attends(cost, cost.window_attention, cost.window_dense_attention, features.window_q_kv, features.window_kv)
    return pairs + cost.window_kv_read * features.window_kv


@rule
def _walk(cost: StepPrices, features: StepFeatures) -> float:
    """Attention's time beyond its pairs and keys where its kernel walks a row's keys by tiles."""
    if cost.walk_rows == 0:
        return 0.0
    rows = features.batch
    at_once = cost.window_walk_rows if cost.window_walk_rows > 0 else cost.walk_rows
    walked = cost.walk * features.sum_kv * -(-rows // cost.walk_rows)
    walked += cost.window_walk * features.window_kv * -(-rows // at_once)
    walked /= max(1, rows)
    pairs = _attends(cost, cost.attention, cost.dense_attention, features.sum_q_kv, features.sum_kv)
    return max(0.0, walked - pairs - cost.kv_read * features.sum_kv - _windows(cost, features))


@rule
def seconds(knots: Knots, cost: StepPrices, features: StepFeatures) -> float:
    """Latency without eviction (LatencyModel's formula)."""
    n, tokens, head, sampled = features.num_forwards, features.tokens, features.head_rows, features.sampled_rows
    launch = n * cost.launch
    host = n * cost.host_step + cost.host_request * features.batch
    sequences = features.batch
    captured = features.prefill_tokens == 0 and 0 < tokens <= cost.graph_tokens
    if captured:
        # Padding to the bucket costs layers and head.
        padding = _bucket(tokens) - tokens
        sequences = _bucket(sequences) + 1  # padding rows have their own
        if head < tokens:  # the LM head is a separate graph
            head, sampled = _filled(head), _filled(sampled)
        else:
            head, sampled = head + padding, sampled + padding
        tokens += padding
        launch = 0.0
    dense = features.prefill_tokens == tokens
    layers = _layers(knots, cost, tokens, features.sum_q_kv, features.sum_kv, n, captured, dense) + _windows(
        cost, features
    )
    layers += _walk(cost, features)
    device = layers + cost.sequence * sequences + cost.head * head + cost.sample * sampled
    if features.continues:
        return max(launch, device)
    if cost.overlap:
        return max(launch + host, device)
    return max(launch, device) + n * cost.host_step + cost.host_request * features.batch


@rule
def seconds_first_whole(
    knots: Knots, cost: StepPrices, features: StepFeatures, tokens: float, qk_pairs: float, keys: float
) -> float:
    """Latency if the first layer computes these tokens, pairs and keys."""
    n = features.num_forwards
    first = _layers(knots, cost, tokens, qk_pairs, keys, n, False, False) / cost.layers
    later = _layers(knots, cost, features.tokens, features.sum_q_kv, features.sum_kv, n, False, False) * (
        1.0 - 1.0 / cost.layers
    )
    device = (
        first + later + _windows(cost, features) + cost.head * features.head_rows + cost.sample * features.sampled_rows
    )
    device += cost.sequence * features.batch
    host = n * cost.host_step + cost.host_request * features.batch
    if cost.overlap:
        return max(n * cost.launch + host, device)
    return max(n * cost.launch, device) + host


@rule
def seconds_evicting(
    knots: Knots, cost: StepPrices, features: StepFeatures, tokens: int, qk_pairs: int, keys: int, sampled: int
) -> float:
    """Latency if these tokens, pairs, keys and sampled rows remain after an eviction."""
    n, planned, launch = features.num_forwards, features.tokens, features.num_forwards * cost.launch
    sequences = features.batch
    captured = cost.captured_evictions and features.tokens <= cost.graph_tokens
    if captured:
        # Both CUDA graphs pad their batch to the bucket size.
        padding = _bucket(tokens) - tokens
        sequences = _bucket(sequences) + 1
        planned, tokens, sampled = _bucket(features.tokens), tokens + padding, sampled + padding
        launch = 0.0
    before = _layers(knots, cost, planned, features.sum_q_kv, features.sum_kv, n, captured, False)
    after = _layers(knots, cost, tokens, qk_pairs, keys, n, captured, False)
    layers = cost.early * before + (1.0 - cost.early) * after
    device = layers + _windows(cost, features) + cost.sequence * sequences + cost.head * tokens + cost.sample * sampled
    host = n * cost.host_step + cost.host_request * features.batch
    if cost.overlap:
        return max(launch + host, device) + cost.eviction
    latency = max(launch, device) + n * cost.host_step + cost.host_request * features.batch
    return latency + cost.eviction


bucket = plain(_bucket)
_seconds, _seconds_first_whole, _seconds_evicting = plain(seconds), plain(seconds_first_whole), plain(seconds_evicting)
_plain_pieces = plain(_pieces)


@dataclass(frozen=True)
class CacheOverhead:
    """A row's cost in one phase of a full-sequence cache in addition to its features' (engine/cache_overhead.py)."""

    cache: str  # kind, such as SparseCache
    phase: str  # such as pack
    row: float  # s
    token: float  # s per token of prompt and canvas


@dataclass(frozen=True)
class LatencyModel:
    """A step's latency (s), a sum over host and device.

        layers  = pieces(tokens) + attends(sum_q_kv) + kv_read * sum_kv
                  + attends(window_q_kv) + window_kv_read * window_kv
        device  = layers + head * head_rows + sample * sampled_rows
        latency = max(launch, device) + host_step + host_request * batch

    `pieces` is affine between knots (tokens, s), with slope `slope` (s/token) after the last: memory-bound, transition,
    compute-bound (Optimus, section 5.2). `launch`, the host's time to enqueue a forward, is hidden while the device is
    slower. Each forward of a step pays pieces, launch and host_step. Each block that commits its last mask adds
    `host_block`; `price` adds it.

    `attends` costs `attention` (`window_attention`) per query-key pair, `dense_attention` per pair beyond a key's first
    `dense_from` queries. Queries per key are the step's mean, sum_q_kv / sum_kv: exact for equal rows, too slow if few
    rows have many.

    With `walk_rows`, attention takes at least the mean row's keys per started `walk_rows` rows (`window_walk_rows` in
    layers with a window): a kernel block walks one row's keys, so few rows leave the device idle. Not with eviction or
    a whole first layer.

    With eviction, a share `early` of the layers computes the planned positions, the rest the retained ones; the host
    waits `eviction` for the choice. Decode steps of at most `graph_tokens` without eviction are captured: padded to a
    bucket, no launch. With `captured_evictions` an evicting step is two graphs, each padded.

    With `larger`, attention takes the larger of its pairs' and keys' time; steps of prompts alone then use
    `prompt_attention` and `prompt_kv_read`. Captured steps use `graph_knots`, if any, and fill a bucket of sequences
    and a spare one for padding, each costing `sequence`.

    If the first layer computes more, 1 / `layers` of the layers' time is priced with its work, uncaptured; layers with
    a window are charged whole.
    """

    knots: tuple[tuple[float, float], ...]
    slope: float
    attention: float = 0.0  # s per query-key pair, all layers without a window
    kv_read: float = 0.0  # s per visible key, all layers without a window
    head: float = 0.0  # s per row of the LM head
    sample: float = 0.0  # s per row of soft-max and sampling
    launch: float = 0.0  # s per forward
    host_step: float = 0.0  # s per forward, never hidden
    host_request: float = 0.0  # s per row, never hidden
    early: Share = 0.0  # share of the layers' work before an eviction
    eviction: float = 0.0  # s per step that evicts, never hidden
    graph_tokens: int = 0  # 0: no capture
    overlap: bool = False  # the device hides host_step and host_request
    cache_overhead: tuple[CacheOverhead, ...] = ()  # of full-sequence caches
    layers: int = field(default=0, metadata=DERIVED)  # of the model; 0: unknown
    captured_evictions: bool = False  # as two graphs
    window_attention: float = 0.0  # s per query-key pair, all layers with a window
    window_kv_read: float = 0.0  # s per key, all layers with a window
    window: int = field(default=0, metadata=DERIVED)  # tokens that layers with a window see; 0: none
    dense_from: int = 0  # queries of a key; 0: all pairs cost the same
    dense_attention: float = 0.0  # s per further query-key pair
    window_dense_attention: float = 0.0  # ... in layers with a window
    larger: bool = False  # of pairs and keys, not their sum
    prompt_attention: float = 0.0  # attention in steps of prompts alone
    prompt_kv_read: float = 0.0  # kv_read in the same
    sequence: float = 0.0  # s of the device per sequence
    graph_knots: tuple[tuple[float, float], ...] = ()  # (tokens, s); empty: as `knots`
    walk: float = 0.0  # s per key of a row and walk_rows rows
    window_walk: float = 0.0  # ... in layers with a window, and window_walk_rows rows
    walk_rows: int = 0  # rows that attention walks at once; 0: no such floor
    window_walk_rows: int = 0  # ... in layers with a window; 0: walk_rows
    host_block: float = 0.0  # s per completed block, never hidden

    def exposed(self) -> "LatencyModel":
        """The model without hidden host time."""
        return replace(self, overlap=False) if self.overlap else self

    def scaled(self, factor: float) -> "LatencyModel":
        """All times multiplied by `factor`."""
        return replace(
            self.times(factor, (*BYTES, *PRODUCTS, *HOST)),
            knots=tuple((x, y * factor) for x, y in self.knots),
            graph_knots=tuple((x, y * factor) for x, y in self.graph_knots),
            cache_overhead=tuple(
                replace(term, row=term.row * factor, token=term.token * factor) for term in self.cache_overhead
            ),
        )

    def times(self, factor: float, terms: Iterable[str]) -> "LatencyModel":
        """Some terms multiplied."""
        return replace(self, **{name: factor * getattr(self, name) for name in terms})

    @property
    def num_knots(self) -> int:
        """Knots of uncaptured steps in `tables`."""
        return len(self.knots)

    @property
    def tables(self) -> tuple[tuple[float, float], ...]:
        """Knots of uncaptured steps, then of captured ones."""
        return self.knots + self.graph_knots

    def pieces(self, tokens: float) -> float:
        """Layers' device time for `tokens` positions (s)."""
        return float(_plain_pieces(self.knots, self.slope, tokens, 0, len(self.knots)))

    def step(self, f: Features, late: Features | None = None, first: Features | None = None) -> float:
        """A step's latency (s); late: features after an eviction; first: of a whole first layer."""
        if first is not None:
            amounts = first.tokens, first.sum_q_kv, first.sum_kv
            return float(_seconds_first_whole(self.tables, self, f, *amounts))
        if late is None:
            return float(_seconds(self.tables, self, f))
        return float(
            _seconds_evicting(self.tables, self, f, late.tokens, late.sum_q_kv, late.sum_kv, late.sampled_rows)
        )  # fmt: skip

    def arrays(self, overhead: npt.NDArray[np.float64] | None = None) -> "Cost":
        """Arrays for rules; overhead [phases, 2]: s per row, and per token of its request."""
        numbers = np.zeros(1, _PRICES)
        for name in _PRICES.names or ():
            numbers[name] = getattr(self, name)
        extra = np.zeros((0, 2)) if overhead is None or not overhead.any() else overhead
        return Cost(np.array(self.tables, np.float64).reshape(-1, 2), table(numbers), extra)


class Prices(Record):
    slope: F8
    attention: F8
    kv_read: F8
    head: F8
    sample: F8
    launch: F8
    host_step: F8
    host_request: F8
    early: F8
    eviction: F8
    window_attention: F8
    window_kv_read: F8
    dense_attention: F8
    window_dense_attention: F8
    prompt_attention: F8
    prompt_kv_read: F8
    sequence: F8
    walk: F8
    window_walk: F8
    host_block: F8
    graph_tokens: I8
    walk_rows: I8
    window_walk_rows: I8
    layers: I8
    num_knots: I8
    dense_from: I8
    overlap: Bool
    captured_evictions: Bool
    larger: Bool


_PRICES = np.dtype(list(columns_of(Prices)))


class Cost(NamedTuple):
    """A latency model for rules."""

    knots: npt.NDArray[np.float64]  # [knots, 2] tokens, s: LatencyModel.tables
    numbers: Table[Prices]  # [1]
    overhead: npt.NDArray[np.float64]  # [phases, 2] or [0, 2]: s per row, and per token of its request


@rule
def blocks_done(replica: Replica) -> int:
    """Blocks of several positions that this step completes."""
    count = 0
    for slot in step_slots(replica):
        count += row_blocks_done(replica.status[slot], replica.committed[slot], int(replica.fixed.block))
    return count


@rule
def row_blocks_done(status: Status, committed: Marks, block: int) -> int:
    """A row's completed blocks; its window may reach into the next block."""
    count = 0
    if block == 1:
        return count
    for first in range(0, len(status), block):
        masks = remaining = 0
        for p in range(first, first + block):
            masks += status[p] == MASKED
            remaining += (status[p] == MASKED) & (not committed[p])
        count += masks > 0 and remaining == 0
    return count


@rule
def step_seconds(cost: Cost, counters: Counters) -> float:
    """A step's latency by features alone (s)."""
    if counters.evicting:
        return seconds_evicting(
            cost.knots,
            cost.numbers[0],
            counters,
            counters.left_tokens,
            counters.left_q_kv,
            counters.left_kv,
            counters.left_sampled,
        )
    if counters.first_tokens > 0:
        return seconds_first_whole(
            cost.knots, cost.numbers[0], counters, counters.first_tokens, counters.first_q_kv, counters.first_kv
        )
    return seconds(cost.knots, cost.numbers[0], counters)


@rule
def price(replica: Replica, cost: Cost) -> float:
    """Latency of the step in flight (s)."""
    counters = replica.counters
    latency = step_seconds(cost, counters)
    if len(cost.overhead) and counters.kind == DECODE_STEP and not counters.evicting:
        overhead = 0.0
        block = int(replica.fixed.block)
        for slot in step_slots(replica):
            sequence = replica.sequences[slot]
            length = int(sequence.prompt) + -(-(int(sequence.end) - int(sequence.prompt)) // block) * block
            overhead += cost.overhead[sequence.phase, 0] + cost.overhead[sequence.phase, 1] * length
        latency += overhead
    if cost.numbers[0].host_block > 0.0:
        latency += cost.numbers[0].host_block * blocks_done(replica)
    return latency


@rule
def _price_each(cost: Cost, steps: Table[Counters], times: npt.NDArray[np.float64]) -> None:
    for i in range(len(times)):
        times[i] = step_seconds(cost, steps[i])


def step_times(model: LatencyModel, columns: Mapping[str, npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Latency of recorded steps (s), without `host_block` and `cache_overhead`.

    columns: as in Counters, one entry per step; missing ones are 0, `num_forwards` 1.
    """
    values = {"num_forwards": 1, **columns}
    times = np.empty(np.broadcast_shapes(*(np.shape(column) for column in values.values())))
    steps = np.zeros(min(len(times), _AT_ONCE), COUNTERS)
    cost = model.arrays()
    for first in range(0, len(times), _AT_ONCE):
        chunk = slice(first, first + _AT_ONCE)
        records = steps[: len(times[chunk])]
        for name, column in values.items():
            records[name] = np.asarray(column)[chunk] if np.ndim(column) else column
        _price_each(cost, table(records), times[chunk])
    return times
