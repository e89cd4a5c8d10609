"""A replica's state as arrays, which rules read and write, compiled or not.

`replica.counters.pages_held` is the replica's, `replica.sequences[slot].start` a running sequence's,
`replica.requests[index].finish` a request's; [slots, width] arrays hold each sequence's window.
`policy.fields.max_chunk` is a policy's field, `policy.columns[slot]` its columns of a sequence, `policy.record` what it
remembers of the replica.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .histogram import NUM_BINS
from .jit import rule
from .records import F8, I2, I4, I8, U1, Bool, Record, Table, dtype_of, table

MASKED, PENDING, CACHED = 0, 1, 2  # a mask; committed with stale KV; committed with right KV
COMPLETED, REJECTED, UNFINISHED, CANCELLED = 0, 1, 2, 3  # a request's status: its place in journal.STATUSES
EMIT_BLOCK, EMIT_STEP, EMIT_END = 0, 1, 2  # when tokens reach the client: its place in EMIT
NOTHING, PREFILL_STEP, DECODE_STEP = 0, 1, 2  # what runs next
AT_BLOCK, AT_TOKEN, IGNORED = 0, 1, 2  # where an EOS ends a request: its place in unmasking.EOS
NO, UNTIL_A_REQUEST, WHATEVER = 0, 1, 2  # how long a step is decided again (hooks.steady)
# A row's part in a step: the numbers of step.Phase.
PREFILL, DENOISE, FLUSH, IDLE, FULL, PACK, REUSE, REFRESH_RESPONSE, REFRESH_PROMPT, PARTIAL = range(10)

# Rows of Replica.lists: slots, but requests in PREEMPTED, FREED and DONE.
RUNNING, ROWS, GROUP, NEXT, FREE, PREEMPTED, FREED, DONE, SCRATCH = range(9)
NUM_LISTS = 9


class Sequence(Record):
    """A running sequence."""

    request: I4  # index in the trace
    prompt: I4  # prompt tokens
    end: I4  # prompt + limit, which the scheduler knows before the EOS
    answer: I4  # prompt + tokens of the true answer
    stop: I4  # where it ends: at its answer's end, or at its limit if an EOS is ignored
    start: I4  # first position of the current block; all before it has KV
    block: I4  # positions of its blocks: the policy's, or fewer if it asks for narrower canvases
    pages: I4  # KV pages held
    window_pages: I4  # ... of layers with a window (windows.py)
    emitted: I4  # tokens returned
    expected: I4  # estimated tokens of its answer
    steps: I4  # of a full-sequence model: steps taken
    block_steps: I4  # ... in the current block
    num_tokens: I4  # of the step in flight: positions computed
    num_keys: I4  # ... keys visible
    num_retained: I4  # ... positions that went through all layers
    fruitless: I4  # decode steps in a row that computed it and committed none of its positions
    left: I4  # of the step in flight: prompt positions that later steps compute
    phase: U1  # ... the row's phase
    seen_commit: Bool  # a position was committed
    unpublished: Bool  # the current block's tokens are not returned yet
    finished: Bool
    prefilled: Bool  # at least once
    lost: Bool  # preempted while the step in flight computes it, whose outcome is dropped
    in_flight: Bool  # scratch


class Counters(Record):
    """The numbers of a replica that change."""

    # The queue and the lists.
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
    loops_left: I8  # steps of the frozen group
    pages_held: I8
    outstanding_tokens: I8  # still to prefill or to return, of all unfinished requests
    expected_tokens: I8  # ... by estimated answer lengths
    submitted: I8
    entered: I8  # requests of the inbox that have come
    num_steps: I8
    completed: I8  # requests
    clock: F8  # s, the time that the replica has reached
    # Since the last commit or completion: steps that prefilled nothing or preempted, and tokens that others prefilled
    # since a preemption or a prompt's end.
    fruitless: I8
    fruitless_tokens: I8
    stalled: Bool  # the steps, or one of their rows, will never make progress
    # The step in flight.
    kind: I8
    now: F8
    latency: F8
    chunk: I8
    threshold: I8  # its place among the policy's thresholds
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
    continues: Bool
    evicting: Bool
    # Of a first layer that computes more than the others, or 0.
    first_tokens: I8
    first_q_kv: I8
    first_kv: I8
    # What an eviction left of the features.
    left_tokens: I8
    left_q_kv: I8
    left_kv: I8
    left_sampled: I8
    # Totals of a run's steps (journal.StepTotals).
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
    """The numbers of a replica that its policy and its memory fix."""

    block: I8  # tokens of a block
    width: I8  # columns of a window
    page: I8  # tokens of a KV page
    num_pages: I8  # of the pool
    max_batch: I8  # running sequences
    max_prefill: I8  # tokens of one prefill
    emit: I8  # EMIT_BLOCK, EMIT_STEP or EMIT_END
    state_tokens: I8  # a token's attention and feed-forward outputs, in tokens of KV
    replica: I8  # its number in the fleet
    eos: I8  # whether requests end at an EOS
    window: I8  # tokens that a layer with a window sees; 0: none, or not modelled
    keeps: I8  # tokens that keep their pages in such layers; 0: all do
    window_bytes: I8  # of a token in such layers
    kv_bytes: I8  # ... in all others
    window_pool: I8  # pages of num_pages reserved for such layers; 0: one pool
    stops: I8  # at an EOS: AT_BLOCK, AT_TOKEN or IGNORED
    num_thresholds: I8  # that a step may have
    most_fruitless: I8  # steps in a row without a commit that end a run
    most_admitted: I8  # requests that one decision may admit
    pace: F8  # times the predicted time of each step that begins


SEQUENCE, COUNTERS, REPLICA = dtype_of(Sequence), dtype_of(Counters), dtype_of(Fixed)

STEP_BINS, GAP_BINS = 0, 1  # rows of Replica.bins
BATCHES, CHUNKS = 0, 1  # rows of Replica.counts


class RequestRow(Record):
    """The outcome of a request, a row of requests.parquet in the trace's order; NaN: did not happen."""

    request: I4  # index in the trace
    replica: I2  # -1 where none was chosen
    status: U1  # index into journal.STATUSES
    arrival: F8
    input_length: I4
    output_length: I4  # tokens of the answer
    max_tokens: I4  # tokens asked for at most
    limited: Bool  # the request sets max_tokens; otherwise it is the true length, hidden from schedulers
    estimate: I4  # tokens of the answer that routers and users' policies expect
    canvas_length: I4  # positions of its canvases, if narrower than the policy's; 0: the policy's; -N: reads one of N
    priority: I4  # lower is sooner
    deadline: F8  # s after its arrival; NaN: none
    scheduled: F8  # start of its first prefill
    first_commit: F8  # end of the step that first committed one of its positions
    first_block: F8  # first whole block ready
    first_emission: F8
    last_emission: F8
    finish: F8  # or when it was cancelled
    num_first: I4  # tokens in the first emission
    num_tokens: I4  # tokens returned
    num_emissions: I4
    num_forwards: I4  # decode steps with it, prefilling rows excluded
    num_committed: I4  # positions committed, prefill's and the trimmed tail's included
    num_computed: I8  # positions through all layers in decode steps
    num_preemptions: I4
    arrived: I4  # tokens with KV from a link
    reserved: I4  # KV pages reserved for them until admission
    found: I4  # ... tokens on those pages that the prefix cache had
    upto: I4  # tokens of its answer after which it leaves this replica; 0: it stays


Status = npt.NDArray[np.uint8]  # [width] MASKED, PENDING or CACHED
Evaluations = npt.NDArray[np.uint16]  # [width] steps that computed the position as a mask
Marks = npt.NDArray[np.bool_]  # [width]


class Asked(NamedTuple):
    """The tokens that each request asks for, [requests], read-only."""

    input_length: npt.NDArray[np.int64]  # of the prompt
    output_length: npt.NDArray[np.int64]  # of the answer
    max_tokens: npt.NDArray[np.int64]  # the answer's limit; its true length if there is none
    estimate: npt.NDArray[np.int64]  # of the answer, for routers and users' policies


class Inbox(NamedTuple):
    """Requests that come at times known in advance, in that order; read-only."""

    requests: npt.NDArray[np.int32]  # indices
    times: npt.NDArray[np.float64]  # s, at the engine
    fits: npt.NDArray[np.bool_]  # whether it could ever serve them


def read_only(column: Any) -> Any:
    """A read-only view: rules are compiled for that one type of array."""
    column = column.view()
    column.setflags(write=False)
    return column


NO_INBOX = Inbox(*(read_only(np.zeros(0, kind)) for kind in (np.int32, np.float64, np.bool_)))


class Replica(NamedTuple):
    """One replica, as rules see it.

    Python keeps `counters` and `fixed` as arrays of one record, which numba accepts several times faster; `core.opened`
    takes the records out.
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
    # [a power of two, 3] request, slot of a preempted one's progress or -1, scratch.
    queue: npt.NDArray[np.int32]
    bins: npt.NDArray[np.int64]  # [2, NUM_BINS] step latencies and gaps between emissions
    counts: npt.NDArray[np.int64]  # [2, most] decode steps by batch and by chunk
    growth: npt.NDArray[np.int32]  # [page] scratch: rows that take a page more in each of the next steps


@rule
def num_arrived(replica: Replica, request: int) -> int:
    """Tokens of a request with KV from a link, until a preemption frees it."""
    row = replica.requests[request]
    return int(row.arrived) if row.num_preemptions == 0 else 0


Fields = TypeVar("Fields", covariant=True)
Columns = TypeVar("Columns", covariant=True)
Memory = TypeVar("Memory", covariant=True)


class PolicyState(NamedTuple, Generic[Fields, Columns, Memory]):
    """A policy's state, as its rules see it; `fields` and `record` as in Replica."""

    fields: Fields  # numeric fields of its parts, and `Part.numbers`
    columns: Table[Columns]  # [slots] Part.columns
    record: Memory  # Part.record: its memory of the replica
    cost: Any  # latency.Cost
    cache: Any = ()  # prefix.Cache, or () for none


AnyPolicy = PolicyState[Any, Any, Any]  # for rules that read no field of the policy


S = TypeVar("S", bound=tuple[Any, ...])


def named(state: S) -> S:
    """The same memory with records' fields as attributes, as rules take it."""
    fields: Any = state
    return fields._replace(
        **{
            name: table(array)
            for name, array in fields._asdict().items()
            if isinstance(array, np.ndarray) and array.dtype.names
        }
    )


def new_replica(fixed: Any, requests: Any, asked: Asked, arrival: Any) -> Replica:
    """A replica without sequences; fixed: an array of one REPLICA."""
    counters = np.zeros(1, COUNTERS)
    counters["num_group"] = -1
    counters["step_min"] = counters["gap_min"] = np.inf
    counters["step_max"] = counters["gap_max"] = -np.inf
    width = int(fixed["width"][0])
    made: Any = Replica
    return made(
        counters, fixed, np.zeros(0, SEQUENCE), np.zeros((0, width), np.uint8),
        np.zeros((0, width), np.uint16), *(np.zeros((0, width), np.bool_) for _ in range(3)), requests,
        asked, arrival, NO_INBOX, np.zeros((NUM_LISTS, 0), np.int32), np.zeros((16, 3), np.int32),
        np.zeros((2, NUM_BINS), np.int64), np.zeros((2, width + 1), np.int64),
        np.zeros(int(fixed["page"][0]), np.int32),
    )  # fmt: skip


def with_slots(replica: Replica, capacity: int) -> Replica:
    """The same replica with room for `capacity` sequences; the lowest free slot is taken first."""
    old = len(replica.sequences)

    def longer(array: Any, axis: int = 0, size: int = capacity) -> Any:
        shape = list(array.shape)
        shape[axis] = max(size, shape[axis])
        made = np.zeros(shape, array.dtype)
        made[tuple(slice(n) for n in array.shape)] = array
        return made

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
    """The same replica with room for `room` more queue entries."""
    counters: Any = replica.counters
    size = len(replica.queue)
    waiting, head = int(counters["num_waiting"][0]), int(counters["queue_head"][0])
    if waiting + room <= size:
        return replica
    while size < waiting + room:
        size *= 2
    queue = np.zeros((size, 3), np.int32)
    queue[:waiting] = replica.queue[(head + np.arange(waiting)) % len(replica.queue)]
    counters["queue_head"] = 0
    return replica._replace(queue=queue)
