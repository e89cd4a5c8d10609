"""The latency of a step: a latency model applied to the step's features."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import numpy.typing as npt

from .jit import plain, rule
from .plain import Share
from .records import Table, table
from .state import COUNTERS, DECODE_STEP, Cost, Counters, Replica, step_slots

_AT_ONCE = 4096  # steps
DERIVED = {"stored": False}  # a field that a profile takes from its model
POWERS_TO = 256  # captured sizes: powers of two up to here, then multiples
DENSE_FROM = 64  # queries of a key


# A step's terms, and what each scales with: bytes that the device moves, its products, or the host.
TERMS = {
    "slope": "products",
    "attention": "products",
    "kv_read": "bytes",
    "window_attention": "products",
    "window_kv_read": "bytes",
    "head": "products",
    "sample": "bytes",
    "walk": "bytes",
    "window_walk": "bytes",
    "draft_step": "bytes",
    "draft_token": "products",
    "draft_context": "products",
    "draft_kv_read": "bytes",
    "draft_serial": "bytes",
    "eviction": "bytes",
    "launch": "host",
    "host_step": "host",
    "host_request": "host",
    "sequence": "host",  # in part the decoder's loop over rows
}


def terms_of(scales: str) -> list[str]:
    """Names of the terms that scale with this."""
    return [name for name, kind in TERMS.items() if kind == scales]


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
    draft_tokens: int = 0  # positions of the draft forward behind it; 0: none

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
def _base(knots: Knots, slope: float, tokens: float) -> float:
    """The layers' time for `tokens` positions without attention (s): linear between knots, then with the slope."""
    x0, y0 = knots[0][0], knots[0][1]
    if tokens <= x0:
        return y0
    for k in range(1, len(knots)):
        x1, y1 = knots[k][0], knots[k][1]
        if tokens <= x1:
            return y0 + (y1 - y0) * ((tokens - x0) / (x1 - x0))
        x0, y0 = x1, y1
    return y0 + slope * (tokens - x0)


@rule
def _pairs(dense: float, pairs: float, keys: float) -> float:
    """Query-key pairs; beyond a key's first DENSE_FROM queries each counts as `dense`."""
    short = min(pairs, DENSE_FROM * keys)
    return short + dense * (pairs - short)


@rule
def _layers(knots: Knots, cost: "LatencyModel", num_forwards: int, tokens: int, pairs: int, keys: int) -> float:
    """The layers' time with attention (s)."""
    base = num_forwards * _base(knots, cost.slope, tokens / num_forwards)
    return base + cost.attention * _pairs(cost.dense, pairs, keys) + cost.kv_read * keys


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
def _windows(cost: "LatencyModel", step: Counters) -> float:
    """Attention's time in layers with a window (s)."""
    pairs = _pairs(cost.dense, step.window_q_kv, step.window_kv)
    return cost.window_attention * pairs + cost.window_kv_read * step.window_kv


@rule
def _walk(cost: "LatencyModel", step: Counters) -> float:
    """Attention's time beyond its pairs and keys where its kernel walks a row's keys by tiles (s)."""
    if cost.walk_rows == 0:
        return 0.0
    rows = step.batch
    window_rows = cost.window_walk_rows if cost.window_walk_rows > 0 else cost.walk_rows
    walked = cost.walk * step.sum_kv * -(-rows // cost.walk_rows)
    walked += cost.window_walk * step.window_kv * -(-rows // window_rows)
    walked /= max(1, rows)
    priced = cost.attention * _pairs(cost.dense, step.sum_q_kv, step.sum_kv) + cost.kv_read * step.sum_kv
    return max(0.0, walked - priced - _windows(cost, step))


@rule
def _drafting(cost: "LatencyModel", step: Counters) -> float:
    """A block drafter's time behind a step (s)."""
    if step.draft_tokens == 0:
        return 0.0
    forward = max(cost.draft_step, cost.draft_token * step.draft_tokens) + cost.draft_kv_read * step.sum_kv
    return forward + cost.draft_context * step.tokens + cost.draft_serial * (step.draft_tokens / step.batch)


@rule
def seconds(knots: Knots, cost: "LatencyModel", step: Counters) -> float:
    """A step's latency by its features (s): LatencyModel's formula."""
    n, tokens, pairs, keys = step.num_forwards, step.tokens, step.sum_q_kv, step.sum_kv
    head, sampled, sequences = step.head_rows, step.sampled_rows, step.batch
    # The layers before an eviction, and a whole first layer, compute more than the others.
    share = 0.0
    early_tokens, early_pairs, early_keys = tokens, pairs, keys
    if step.evicting:
        share = cost.early
        tokens, pairs, keys = step.left_tokens, step.left_q_kv, step.left_kv
        head, sampled = tokens, step.left_sampled
    elif step.first_tokens > 0:
        share = 1.0 / cost.layers
        early_tokens, early_pairs, early_keys = step.first_tokens, step.first_q_kv, step.first_kv
    launch = n * cost.launch
    if 0 < step.tokens <= cost.graph_tokens and step.prefill_tokens == 0 and step.first_tokens == 0:
        # A captured graph: padding to the bucket costs layers, head and a sequence of its own.
        launch = 0.0
        padding = _bucket(tokens) - tokens
        if head < tokens:  # the LM head is a separate graph
            head, sampled = _filled(head), _filled(sampled)
        else:
            head, sampled = head + padding, sampled + padding
        sequences = _bucket(sequences) + 1
        early_tokens, tokens = _bucket(early_tokens), tokens + padding
    layers = _layers(knots, cost, n, tokens, pairs, keys)
    if share > 0.0:
        layers = share * _layers(knots, cost, n, early_tokens, early_pairs, early_keys) + (1.0 - share) * layers
    device = layers + _windows(cost, step)
    device += _walk(cost, step) + _drafting(cost, step)
    device = device + cost.sequence * sequences + cost.head * head + cost.sample * sampled
    if step.continues:
        latency = max(launch, device)
    elif cost.overlap:
        latency = max(launch + (n * cost.host_step + cost.host_request * step.batch), device)
    else:
        latency = max(launch, device) + n * cost.host_step + cost.host_request * step.batch
    if step.evicting:
        latency += cost.eviction
    return latency


bucket = plain(_bucket)
_plain_seconds, _plain_base = plain(seconds), plain(_base)


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

        layers  = base(tokens) + attention * pairs(sum_q_kv) + kv_read * sum_kv
                  + window_attention * pairs(window_q_kv) + window_kv_read * window_kv
        device  = layers + sequence * batch + head * head_rows + sample * sampled_rows
        latency = max(launch, device) + host_step + host_request * batch

    `base` is a table that never falls: linear between knots (tokens, s), with slope `slope` (s/token) after the last.
    `launch`, the host's time to enqueue a forward, is hidden while the device is slower. Each forward of a step pays
    base, launch and host_step. With `overlap` it is max(launch + host_step + host_request * batch, device); a step that
    the host planned with the one before takes max(launch, device).

    A pair beyond a key's first DENSE_FROM queries counts as `dense`. Queries per key are the step's mean, sum_q_kv /
    sum_kv: exact for equal rows, too slow if few rows have many.

    A step whose drafts a block drafter makes also takes

        max(draft_step, draft_token * draft_tokens) + draft_context * tokens + draft_kv_read * sum_kv
            + draft_serial * draft_tokens / batch

    With `walk_rows`, attention takes at least the mean row's keys per started `walk_rows` rows (`window_walk_rows` in
    layers with a window): a kernel block walks one row's keys, so few rows leave the device idle.

    A step of two stages has the same formula: with eviction, a share `early` of the layers computes the planned
    positions, the rest the retained ones, and the host waits `eviction` for the choice; a first layer that computes
    more is 1 / `layers` of them. Layers with a window are charged whole. Decode steps of at most `graph_tokens` are
    captured: padded to a bucket of tokens, and of sequences with a spare one, without a launch.
    """

    knots: tuple[tuple[float, float], ...]
    slope: float
    attention: float = 0.0  # s per query-key pair, all layers without a window
    kv_read: float = 0.0  # s per visible key, all layers without a window
    head: float = 0.0  # s per row of the LM head
    sample: float = 0.0  # s per row of soft-max and sampling
    launch: float = 0.0  # s per forward
    host_step: float = 0.0  # s per forward, hidden by `overlap` alone
    host_request: float = 0.0  # s per row, hidden by `overlap` alone
    early: Share = 0.0  # share of the layers' work before an eviction
    eviction: float = 0.0  # s per step that evicts, never hidden
    graph_tokens: int = 0  # 0: no capture
    overlap: bool = False  # the device hides host_step and host_request
    cache_overhead: tuple[CacheOverhead, ...] = ()  # of full-sequence caches
    layers: int = field(default=0, metadata=DERIVED)  # of the model; 0: unknown
    window_attention: float = 0.0  # s per query-key pair, all layers with a window
    window_kv_read: float = 0.0  # s per key, all layers with a window
    window: int = field(default=0, metadata=DERIVED)  # tokens that layers with a window see; 0: none
    dense: float = 1.0  # times a pair's time, beyond a key's first DENSE_FROM queries
    sequence: float = 0.0  # s of the device per sequence
    walk: float = 0.0  # s per key of a row and walk_rows rows
    window_walk: float = 0.0  # ... in layers with a window, and window_walk_rows rows
    walk_rows: int = 0  # rows that attention walks at once; 0: no such floor
    window_walk_rows: int = 0  # ... in layers with a window; 0: walk_rows
    draft_step: float = 0.0  # s per draft forward, at least
    draft_token: float = 0.0  # s per position of a draft forward
    draft_context: float = 0.0  # s per token whose keys and values the drafter takes from the model
    draft_kv_read: float = 0.0  # s per visible key, all layers of the drafter
    draft_serial: float = 0.0  # s per position of a row's block, one after the other

    def exposed(self) -> "LatencyModel":
        """The model without hidden host time."""
        return replace(self, overlap=False) if self.overlap else self

    def scaled(self, factor: float) -> "LatencyModel":
        """All times multiplied by `factor`."""
        return replace(
            self.times(factor, TERMS),
            knots=tuple((tokens, factor * height) for tokens, height in self.knots),
            cache_overhead=tuple(
                replace(term, row=term.row * factor, token=term.token * factor) for term in self.cache_overhead
            ),
        )

    def times(self, factor: float, terms: Iterable[str]) -> "LatencyModel":
        """Some terms multiplied."""
        return replace(self, **{name: factor * getattr(self, name) for name in terms})

    def base(self, tokens: float) -> float:
        """Layers' device time for `tokens` positions without attention (s)."""
        return float(_plain_base(self.knots, self.slope, tokens))

    def step(self, f: Features, late: Features | None = None, first: Features | None = None) -> float:
        """A step's latency (s); late: features after an eviction; first: of a whole first layer."""
        record: Any = table(np.zeros(1, COUNTERS))[0]
        for name, value in zip(Features._fields, f, strict=True):
            record[name] = value
        record["continues"] = f.continues
        if first is not None:
            record["first_tokens"], record["first_q_kv"], record["first_kv"] = first[:3]
        elif late is not None:
            record["evicting"], record["left_sampled"] = True, late.sampled_rows
            record["left_tokens"], record["left_q_kv"], record["left_kv"] = late[:3]
        return float(_plain_seconds(self.knots, self, record))

    def arrays(self, overhead: npt.NDArray[np.float64] | None = None) -> "Cost":
        """Arrays for rules; overhead [phases, 2]: s per row, and per token of its request."""
        numbers = np.zeros(1, _PRICES)
        for name in _PRICES.names or ():
            numbers[name] = getattr(self, name)
        extra = np.zeros((0, 2)) if overhead is None or not overhead.any() else overhead
        return Cost(np.array(self.knots, np.float64).reshape(-1, 2), table(numbers), extra)


_DTYPES = {float: "float64", int: "int64", bool: "bool"}
_HINTS = get_type_hints(LatencyModel)
_PRICES = np.dtype([(name, _DTYPES[kind]) for name, kind in _HINTS.items() if kind in _DTYPES])


@rule
def price(replica: Replica, cost: Cost) -> float:
    """Latency of the step in flight (s)."""
    counters = replica.counters
    latency = seconds(cost.knots, cost.numbers[0], counters)
    if len(cost.overhead) and counters.kind == DECODE_STEP and not counters.evicting:
        overhead = 0.0
        block = int(replica.fixed.block)
        for slot in step_slots(replica):
            sequence = replica.sequences[slot]
            length = int(sequence.prompt) + -(-(int(sequence.end) - int(sequence.prompt)) // block) * block
            overhead += cost.overhead[sequence.phase, 0] + cost.overhead[sequence.phase, 1] * length
        latency += overhead
    return latency


@rule
def _price_each(cost: Cost, steps: Table[Counters], times: npt.NDArray[np.float64]) -> None:
    for i in range(len(times)):
        times[i] = seconds(cost.knots, cost.numbers[0], steps[i])


def step_times(model: LatencyModel, columns: Mapping[str, npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Latency of recorded steps (s), without `cache_overhead`.

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
