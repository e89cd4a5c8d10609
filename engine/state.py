"""A replica's state as arrays, read and written by rules, compiled or not.

`replica.counters.pages_held` is the replica's, `replica.sequences[slot].start` a running sequence's,
`replica.requests[index].finish` a request's; [slots, width] arrays hold sequences' windows. `policy.fields.max_chunk`
is a policy's field, `policy.columns[slot]` its columns of a sequence, `policy.record` its memory of the replica.
"""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .histogram import NUM_BINS
from .jit import inlined, rule
from .records import F8, I2, I4, I8, U1, Bool, Record, Table, dtype_of, table

if TYPE_CHECKING:
    from .latency import LatencyModel

MASKED, PENDING, CACHED = 0, 1, 2  # a mask; committed, KV stale; committed, KV right
COMPLETED, REJECTED, UNFINISHED, CANCELLED = 0, 1, 2, 3  # status; places in journal.STATUSES
EMIT_BLOCK, EMIT_STEP, EMIT_END = 0, 1, 2  # when clients get tokens; places in EMIT
NOTHING, PREFILL_STEP, DECODE_STEP, ASK_AGAIN = 0, 1, 2, 3  # what runs next, or the discipline is asked for one more
AT_BLOCK, IGNORED = 0, 1  # where an EOS ends a request; places in unmasking.EOS
NEVER = 2**62  # more requests than can wait
NO, UNTIL_A_REQUEST, WHATEVER = 0, 1, 2  # how long a decision stays the same (hooks.steady)
# A row's part in a step; step.Phase.
PREFILL, DENOISE, FLUSH, IDLE, FULL, PACK, REUSE, REFRESH_RESPONSE, REFRESH_PROMPT, PARTIAL = range(10)

# Rows of Replica.lists: slots; requests in PREEMPTED, FREED, DONE.
RUNNING, ROWS, GROUP, NEXT, FREE, PREEMPTED, FREED, DONE, SCRATCH = range(9)
NUM_LISTS = 9


class Sequence(Record):
    """A running sequence."""

    request: I4  # index in the trace
    prompt: I4  # tokens
    end: I4  # prompt + limit, as the scheduler knows before the EOS
    answer: I4  # prompt + tokens of the true answer
    stop: I4  # the answer's end, or the limit if an EOS is ignored
    start: I4  # first position of the current block; all before have KV
    block: I4  # positions; fewer in a cut pass that commits a canvas
    pages: I4  # KV pages held
    window_pages: I4  # ... of layers with a window (window_pages.py)
    emitted: I4  # tokens returned
    expected: I4  # estimated answer tokens
    steps: I4  # of a full-sequence model: steps taken
    block_steps: I4  # ... in the current block
    num_tokens: I4  # of the step in flight: positions computed
    num_keys: I4  # ... visible keys
    num_retained: I4  # ... positions through all layers
    fruitless: I4  # decode steps in a row that computed it and committed nothing of it
    left: I4  # of the step in flight: prompt positions left to later steps
    phase: U1
    seen_commit: Bool  # has committed a position
    unpublished: Bool  # the current block's tokens are not yet returned
    finished: Bool
    prefilled: Bool  # at least once
    lost: Bool  # preempted during the step in flight, whose outcome is dropped for it
    in_flight: Bool  # scratch


class Counters(Record):
    """A replica's changing numbers."""

    queue_head: I8
    num_waiting: I8
    num_running: I8
    num_rows: I8
    num_group: I8
    num_next: I8
    num_free: I8
    num_preempted: I8
    num_freed: I8
    num_done: I8
    next_kind: I8  # decided ahead
    next_draft_tokens: I8  # ... draft_tokens
    loops_left: I8  # steps of the frozen group
    pages_held: I8
    expected_tokens: I8  # to prefill or expected to be returned, of unfinished requests
    submitted: I8
    entered: I8  # requests taken from the inbox
    num_steps: I8
    completed: I8
    clock: F8  # s, reached
    fruitless: I8  # since the last commit or completion: steps without prefill or with preemption
    stalled: Bool  # steps or a row will never make progress
    ask_from: I8  # waiting requests from which a decision asks the discipline
    is_asked: Bool  # about the coming decision
    # The step in flight.
    kind: I8
    now: F8
    latency: F8
    chunk: I8
    threshold: I8  # index into the policy's
    waiting: I8
    running: I8
    pages: I8
    submitted_then: I8
    tokens: I8
    sum_q_kv: I8
    sum_kv: I8
    head_rows: I8
    sampled_rows: I8
    batch: I8
    prefill_tokens: I8
    num_forwards: I8
    window_q_kv: I8
    window_kv: I8
    draft_tokens: I8  # positions of the draft forward behind it; 0: none
    continues: Bool
    evicting: Bool
    # A first layer that computes more than the others, or 0.
    first_tokens: I8
    first_q_kv: I8
    first_kv: I8
    # Features after an eviction.
    left_tokens: I8
    left_q_kv: I8
    left_kv: I8
    left_sampled: I8
    # Totals (journal.StepTotals).
    num_decode_steps: I8
    num_prefill_steps: I8
    prefill_time: F8
    decode_time: F8
    end: F8  # of the last finished step
    page_time: F8
    total_tokens: I8
    total_evicted: I8
    total_committed: I8
    forwards: I8
    total_prefill_tokens: I8
    preemptions: I8
    max_waiting: I8
    step_count: I8
    step_sum: F8
    step_min: F8
    step_max: F8
    gap_count: I8
    gap_sum: F8
    gap_min: F8
    gap_max: F8


class Fixed(Record):
    """A replica's numbers that policy and memory fix."""

    block: I8  # tokens
    width: I8  # columns of a window
    page: I8  # tokens of KV
    num_pages: I8
    max_batch: I8  # running sequences
    max_prefill: I8  # tokens
    emit: I8  # EMIT_BLOCK, EMIT_STEP or EMIT_END
    state_tokens: I8  # a token's attention and feed-forward outputs, in tokens of KV
    replica: I8  # its number in the fleet
    eos: I8  # requests end at an EOS
    window: I8  # tokens seen by a layer with a window; 0: none, or not modelled
    keeps: I8  # tokens with pages in such layers; 0: all
    window_bytes: I8  # of a token in such layers
    kv_bytes: I8  # ... in all others
    window_pool: I8  # pages of num_pages reserved for such layers; 0: one pool
    stops: I8  # AT_BLOCK or IGNORED
    num_thresholds: I8  # to choose from
    context_limit: I8  # tokens of prompt and output
    most_fruitless: I8  # this many steps in a row without a commit end a run


SEQUENCE, COUNTERS, REPLICA = dtype_of(Sequence), dtype_of(Counters), dtype_of(Fixed)

STEP_BINS, GAP_BINS = 0, 1  # rows of Replica.bins
BATCHES, CHUNKS = 0, 1  # rows of Replica.counts


class RequestRow(Record):
    """A request's outcome, a row of requests.parquet in trace order; NaN: did not happen."""

    request: I4  # index in the trace
    replica: I2  # -1: none chosen
    status: U1  # index into journal.STATUSES
    arrival: F8
    input_length: I4
    output_length: I4  # answer tokens
    max_tokens: I4
    limited: Bool  # the request sets max_tokens; else it is the true length, hidden from schedulers
    estimate: I4  # answer tokens, for routers and users' policies
    slo_class: I4  # view.class_of its name
    priority: I4  # lower first
    deadline: F8  # s after arrival; NaN: none
    scheduled: F8  # start of its first prefill
    first_commit: F8  # end of the first step that committed one of its positions
    first_block: F8  # first whole block
    first_emission: F8
    last_emission: F8
    finish: F8  # or cancellation
    num_first: I4  # tokens in the first emission
    num_tokens: I4  # tokens returned
    num_emissions: I4
    num_forwards: I4  # decode steps, prefilling rows excluded
    num_committed: I4  # positions, with prefill's and the trimmed tail's
    num_computed: I8  # positions through all layers in decode steps
    num_preemptions: I4
    arrived: I4  # tokens with KV from a link
    reserved: I4  # KV pages reserved for them until admission
    found: I4  # ... tokens on them from the prefix cache


Status = npt.NDArray[np.uint8]  # [width] MASKED, PENDING or CACHED
Evaluations = npt.NDArray[np.uint16]  # [width] steps that computed the position as a mask
Marks = npt.NDArray[np.bool_]  # [width]


class Asked(NamedTuple):
    """Tokens of each request, [requests], read-only."""

    input_length: npt.NDArray[np.int64]
    output_length: npt.NDArray[np.int64]  # the true answer
    max_tokens: npt.NDArray[np.int64]  # limit; without one the true length
    estimate: npt.NDArray[np.int64]  # of the answer, for routers and users' policies


class Inbox(NamedTuple):
    """Requests with known arrival times, in order; read-only."""

    requests: npt.NDArray[np.int32]  # indices
    times: npt.NDArray[np.float64]  # s, at the engine
    fits: npt.NDArray[np.bool_]  # could ever be served


def read_only(column: Any) -> Any:
    """A read-only view, the only array type that rules are compiled for."""
    column = column.view()
    column.setflags(write=False)
    return column


NO_INBOX = Inbox(*(read_only(np.zeros(0, kind)) for kind in (np.int32, np.float64, np.bool_)))


class Replica(NamedTuple):
    """One replica, as rules see it.

    In Python `counters` and `fixed` are arrays of one record, which numba accepts several times faster (`core.opened`).
    """

    counters: Counters
    fixed: Fixed
    sequences: Table[Sequence]  # [slots]
    status: npt.NDArray[np.uint8]  # [slots, width] MASKED, PENDING or CACHED
    evaluations: npt.NDArray[np.uint16]  # [slots, width] steps that computed the position as a mask
    window: npt.NDArray[np.bool_]  # [slots, width] positions that the step in flight computes
    committed: npt.NDArray[np.bool_]  # ... commits
    retained: npt.NDArray[np.bool_]  # ... computes in all layers
    requests: Table[RequestRow]  # [requests]
    asked: Asked
    arrival: npt.NDArray[np.float64]  # [requests] s, read-only
    inbox: Inbox
    lists: npt.NDArray[np.int32]  # [NUM_LISTS, slots]
    # [a power of two, 4] request; slot of a preempted one's progress, or -1; scratch; held back by the discipline
    queue: npt.NDArray[np.int32]
    bins: npt.NDArray[np.int64]  # [2, NUM_BINS] step latencies and gaps between emissions
    counts: npt.NDArray[np.int64]  # [2, most] decode steps by batch and by chunk
    growth: npt.NDArray[np.int32]  # [page] scratch: rows that take another page in each of the next steps


class RequestDraw(Record):
    """Draws fixed for a request's life."""

    factor: F8  # of the odds
    last_block: I4  # from the start of the prompt
    num_padding: I4  # last blocks of padding
    most: I4  # by a law: steps of a block


class Draws(NamedTuple):
    """A commit model, law or schedule with its seed, for rules."""

    requests: Table[RequestDraw]  # [requests]
    streams: npt.NDArray[np.uint64]  # [4] a key per purpose
    # [width] by distance from the frontier; for drafts, acceptances.
    odds: npt.NDArray[np.float64]
    # [block_length + 1] by committed positions; with a histogram, CanvasLaw.by_canvas.
    stage: npt.NDArray[np.float64]
    # [3, 1024] quantiles of block factors, step factors, and the normal distribution.
    factors: npt.NDArray[np.float64]
    deltas: npt.NDArray[np.float64]  # [5] ImportanceDeltas
    schedule: npt.NDArray[np.int64]  # [steps] masks that commit in each step of a block
    # [3] CanvasLaw's median, drift, least; with a histogram [3 + CELLS], then its forwards.
    law: npt.NDArray[np.float64]
    # Blocks commit apart (several-blocks.md 3): factor of the odds for each earlier block with masks, and the share of
    # the block before without masks from which at least the best commits. Empty: a row's blocks share a frontier.
    ahead: npt.NDArray[np.float64]


class Masks(NamedTuple):
    """What the draws of commits depend on, of a plan's rows or of one."""

    status: Any  # [rows, width], or [width]
    evaluations: Any
    window: Any  # positions computed
    start: Any  # [rows] absolute position of column 0, or a number
    prompt: Any  # tokens
    request: Any


class Cost(NamedTuple):
    """A latency model for rules."""

    knots: npt.NDArray[np.float64]  # [knots, 2] tokens, s
    numbers: Table["LatencyModel"]  # [1]
    overhead: npt.NDArray[np.float64]  # [phases, 2] or [0, 2]: s per row, and per token of its request


@inlined
def step_slots(replica: Replica) -> npt.NDArray[np.int32]:
    """Slots of the step's rows, in order."""
    return replica.lists[ROWS, : replica.counters.num_rows]


@inlined
def running_slots(replica: Replica) -> npt.NDArray[np.int32]:
    """Slots of the running sequences, in order."""
    return replica.lists[RUNNING, : replica.counters.num_running]


@rule
def num_arrived(replica: Replica, request: int) -> int:
    """Tokens of a request with KV from a link, until a preemption frees it."""
    row = replica.requests[request]
    return int(row.arrived) if row.num_preemptions == 0 else 0


Fields = TypeVar("Fields", covariant=True)
Columns = TypeVar("Columns", covariant=True)
Memory = TypeVar("Memory", covariant=True)


class PolicyState(NamedTuple, Generic[Fields, Columns, Memory]):
    """A policy's state as its rules see it; `fields` and `record` as `counters` in Replica."""

    fields: Fields  # numeric fields of its parts, and Part.numbers
    columns: Table[Columns]  # [slots] Part.columns
    record: Memory  # Part.record: memory of the replica
    cost: Any  # latency.Cost
    cache: Any = ()  # prefix.Cache; (): none
    thresholds: Any = ()  # [thresholds] that steps choose from; a NaN: they choose none


AnyPolicy = PolicyState[Any, Any, Any]  # for rules that read no policy field


S = TypeVar("S", bound=tuple[Any, ...])


def as_tables(state: S) -> S:
    """The same memory with records' fields as attributes."""
    fields: Any = state
    return fields._replace(
        **{
            name: table(array)
            for name, array in fields._asdict().items()
            if isinstance(array, np.ndarray) and array.dtype.names
        }
    )


def new_replica(fixed: Any, requests: Any, asked: Asked, arrival: Any) -> Replica:
    """A replica without sequences; fixed: one REPLICA in an array."""
    counters = np.zeros(1, COUNTERS)
    counters["num_group"] = -1
    counters["ask_from"] = NEVER
    counters["step_min"] = counters["gap_min"] = np.inf
    counters["step_max"] = counters["gap_max"] = -np.inf
    width = int(fixed["width"][0])
    record: Any = Replica
    marks = {name: np.zeros((0, width), np.bool_) for name in ("window", "committed", "retained")}
    return record(
        counters=counters, fixed=fixed, sequences=np.zeros(0, SEQUENCE), status=np.zeros((0, width), np.uint8),
        evaluations=np.zeros((0, width), np.uint16), **marks, requests=requests, asked=asked, arrival=arrival,
        inbox=NO_INBOX, lists=np.zeros((NUM_LISTS, 0), np.int32), queue=np.zeros((16, 4), np.int32),
        bins=np.zeros((2, NUM_BINS), np.int64), counts=np.zeros((2, width + 1), np.int64),
        growth=np.zeros(int(fixed["page"][0]), np.int32),
    )  # fmt: skip


def with_slots(replica: Replica, capacity: int) -> Replica:
    """The replica with room for `capacity` sequences; the lowest free slot is taken first."""
    old = len(replica.sequences)

    def longer(array: Any, axis: int = 0, size: int = capacity) -> Any:
        shape = list(array.shape)
        shape[axis] = max(size, shape[axis])
        extended = np.zeros(shape, array.dtype)
        extended[tuple(slice(n) for n in array.shape)] = array
        return extended

    counters: Any = replica.counters
    lists = longer(replica.lists, axis=1)
    free = int(counters["num_free"][0])
    new = np.arange(capacity - 1, old - 1, -1)
    lists[FREE, : len(new) + free] = np.concatenate([new, replica.lists[FREE, :free]])
    counters["num_free"] = free + len(new)
    return replica._replace(
        sequences=longer(replica.sequences), status=longer(replica.status),
        evaluations=longer(replica.evaluations), window=longer(replica.window), committed=longer(replica.committed),
        retained=longer(replica.retained), lists=lists, counts=longer(replica.counts, 1, capacity + 1),
    )  # fmt: skip


def with_queue(replica: Replica, room: int) -> Replica:
    """The replica with room for `room` more queue entries."""
    counters: Any = replica.counters
    size = len(replica.queue)
    waiting, head = int(counters["num_waiting"][0]), int(counters["queue_head"][0])
    if waiting + room <= size:
        return replica
    while size < waiting + room:
        size *= 2
    queue = np.zeros((size, 4), np.int32)
    queue[:waiting] = replica.queue[(head + np.arange(waiting)) % len(replica.queue)]
    counters["queue_head"] = 0
    return replica._replace(queue=queue)
