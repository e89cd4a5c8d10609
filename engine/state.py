"""A replica's state as arrays: what rules read and write, whether they are compiled or run as plain Python.

Records have named fields. `w.c[0].pages_held` is a number of the replica, `w.q[slot].start` one of a running sequence,
`w.r[index].finish` one of a request; [slots, width] arrays hold the positions of each sequence's window of blocks.
"""

from typing import Any, NamedTuple

import numpy as np

from .histogram import NUM_BINS

MASKED, PENDING, CACHED = 0, 1, 2  # a mask; committed, its KV stale; committed, its KV right
COMPLETED, REJECTED, UNFINISHED, CANCELLED = 0, 1, 2, 3  # a request's status: its place in journal.STATUSES
EMIT_BLOCK, EMIT_STEP, EMIT_END = 0, 1, 2  # when tokens reach the client: its place in EMIT
NOTHING, PREFILL_STEP, DECODE_STEP = 0, 1, 2  # what runs next
AT_BLOCK, AT_TOKEN, IGNORED = 0, 1, 2  # where an EOS ends a request: its place in unmasking.EOS
# What a row does in a step: the numbers of step.Phase.
PREFILL, DENOISE, FLUSH, IDLE, FULL, PACK, REUSE, REFRESH_RESPONSE, REFRESH_PROMPT, PARTIAL = range(10)

# Rows of World.lists: slots, but for PREEMPTED, FREED and DONE, which hold indices of requests.
RUNNING, ROWS, GROUP, NEXT, FREE, PREEMPTED, FREED, DONE, SCRATCH = range(9)
NUM_LISTS = 9

SEQUENCE = np.dtype(
    [
        ("request", "i4"),  # index in the trace
        ("prompt", "i4"),  # prompt tokens
        ("end", "i4"),  # prompt + tokens asked for at most: all that a scheduler knows before the EOS comes
        ("answer", "i4"),  # prompt + tokens of the answer, which is handed out
        ("stop", "i4"),  # where it is over: at the end of its answer, or at its limit where an EOS is ignored
        ("start", "i4"),  # first position of the current block: all before it has its KV
        ("block", "i4"),  # positions of its blocks: the policy's, or of the narrower canvas that it asks for
        ("pages", "i4"),  # KV pages held
        ("window_pages", "i4"),  # ... and those that layers with a window hold beside them (windows.py)
        ("emitted", "i4"),  # tokens handed out
        ("expected", "i4"),  # tokens of its answer, as somebody estimates them
        ("steps", "i4"),  # of a full-sequence model: steps taken
        ("block_steps", "i4"),  # ... and of those in the current block
        ("num_tokens", "i4"),  # of the step in flight: positions computed
        ("num_keys", "i4"),  # ... keys visible
        ("num_retained", "i4"),  # ... positions that went through all layers
        ("fruitless", "i4"),  # decode steps in a row that computed it and committed none of its positions
        ("left", "i4"),  # ... where it prefills: positions of the prompt that later steps compute
        ("phase", "u1"),  # ... what the row does
        ("seen_commit", "?"),  # a position was committed
        ("unpublished", "?"),  # the current block's tokens are not handed out yet
        ("finished", "?"),
        ("prefilled", "?"),  # at least once
        ("lost", "?"),  # preempted while the step in flight computes it: that outcome is thrown away
        ("in_flight", "?"),  # scratch
    ],
    align=True,
)

_FEATURES = (
    "tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "batch", "prefill_tokens", "num_forwards",
    "window_q_kv", "window_kv",
)  # fmt: skip

COUNTERS = np.dtype(
    [
        # The queue and the lists.
        ("queue_head", "i8"), ("num_waiting", "i8"), ("num_running", "i8"), ("num_rows", "i8"), ("num_group", "i8"),
        ("num_next", "i8"), ("num_free", "i8"), ("num_preempted", "i8"), ("num_freed", "i8"), ("num_done", "i8"),
        ("next_kind", "i8"),  # decided ahead
        ("loops_left", "i8"),  # steps of the frozen group
        ("pages_held", "i8"),
        ("outstanding_tokens", "i8"),  # still to prefill or to return, of every request not finished
        ("expected_tokens", "i8"),  # ... as far as the answers' lengths are estimated
        ("submitted", "i8"),
        ("num_steps", "i8"),
        ("completed", "i8"),  # requests
        ("clock", "f8"),  # s, up to where the replica has been run
        # Since the last commit or completion: steps that prefilled nothing or preempted a sequence, and the tokens
        # that the others have prefilled since a preemption or the end of a prompt.
        ("fruitless", "i8"), ("fruitless_tokens", "i8"),
        ("stalled", "?"),  # nothing more will come of the steps, or of one of their rows
        # The step in flight.
        ("kind", "i8"),
        ("now", "f8"),
        ("latency", "f8"),
        ("chunk", "i8"),
        ("threshold", "i8"),  # its place among the policy's thresholds
        ("waiting", "i8"), ("running", "i8"), ("pages", "i8"), ("submitted_then", "i8"),
        *((name, "i8") for name in _FEATURES),
        ("continues", "?"),
        ("evicting", "?"),
        ("first_tokens", "i8"), ("first_q_kv", "i8"), ("first_kv", "i8"),  # of a first layer that computes more, or 0
        # Of its features, what an eviction left.
        ("left_tokens", "i8"), ("left_q_kv", "i8"), ("left_kv", "i8"), ("left_sampled", "i8"),
        # What a run's steps add up to (journal.StepTotals).
        ("num_decode_steps", "i8"), ("num_prefill_steps", "i8"), ("prefill_time", "f8"), ("decode_time", "f8"),
        ("end", "f8"),  # of the last step that is over
        ("page_time", "f8"), ("total_tokens", "i8"), ("total_evicted", "i8"), ("total_committed", "i8"),
        ("forwards", "i8"), ("total_prefill_tokens", "i8"), ("preemptions", "i8"), ("max_waiting", "i8"),
        ("step_count", "i8"), ("step_sum", "f8"), ("step_min", "f8"), ("step_max", "f8"),
        ("gap_count", "i8"), ("gap_sum", "f8"), ("gap_min", "f8"), ("gap_max", "f8"),
    ],
    align=True,
)  # fmt: skip

# What a replica and its policy's memory fix.
REPLICA = np.dtype(
    [
        ("block", "i8"), ("width", "i8"), ("page", "i8"), ("num_pages", "i8"), ("max_batch", "i8"),
        ("max_prefill", "i8"), ("emit", "i8"), ("state_tokens", "i8"), ("replica", "i8"), ("eos", "i8"),
        ("window", "i8"),  # tokens that a layer with a window sees; 0: the model has none, or nobody asks
        # Tokens that keep their pages in such layers, 0: all do; bytes of a token there, and in all other layers.
        ("keeps", "i8"), ("window_bytes", "i8"), ("kv_bytes", "i8"),
        ("window_pool", "i8"),  # of num_pages, those that only such layers use; 0: all layers share one pool
        ("stops", "i8"),  # at an EOS: AT_BLOCK, AT_TOKEN or IGNORED
        ("num_thresholds", "i8"),  # that a step may have
        ("most_fruitless", "i8"),  # steps in a row without a commit that end a run
    ],
    align=True,
)  # fmt: skip

STEP_BINS, GAP_BINS = 0, 1  # rows of World.bins
BATCHES, CHUNKS = 0, 1  # rows of World.counts


class Asked(NamedTuple):
    """What each request asks for: tokens."""

    input_length: Any  # [requests] int64: of the prompt
    output_length: Any  # ... of the answer
    max_tokens: Any  # ... of the answer at most: where no request sets a limit, its true length
    estimate: Any  # ... of the answer, as far as a router or a policy of a user's own knows


class World(NamedTuple):
    """One replica's arrays."""

    c: Any  # [1] COUNTERS
    f: Any  # [1] REPLICA: what is fixed
    q: Any  # [slots] SEQUENCE
    status: Any  # [slots, width] uint8: MASKED, PENDING or CACHED
    evaluations: Any  # [slots, width] uint16: steps that computed the position as a mask
    window: Any  # [slots, width] bool, of the step in flight: positions computed
    committed: Any  # ... committed
    retained: Any  # ... that went through all layers
    r: Any  # [requests] journal.REQUEST
    asked: Any  # Asked: what they ask for, to be read
    arrival: Any  # [requests] float64: when they came (s), to be read
    lists: Any  # [NUM_LISTS, slots] int32
    queue: Any  # [a power of two, 3] int32: request, the slot that holds a preempted one's progress or -1, and scratch
    bins: Any  # [2, NUM_BINS] int64: step latencies and gaps between emissions
    counts: Any  # [2, most] int64: decode steps by batch and by chunk


class Own(NamedTuple):
    """A policy's own state: its numbers, a record a sequence, a record of the replica, and what it may ask."""

    p: Any  # [1] its fields
    s: Any  # [slots]
    m: Any  # [1]
    k: Any  # latency.Cost: what steps cost, where the policy asks
    c: Any = ()  # prefix.Cache: the pages that requests may share, where they may


def new_world(fixed: Any, requests: Any, asked: Asked, arrival: Any) -> World:
    """A replica without sequences."""
    c = np.zeros(1, COUNTERS)
    c["num_group"] = -1
    c["step_min"] = c["gap_min"] = np.inf
    c["step_max"] = c["gap_max"] = -np.inf
    width = int(fixed["width"][0])
    cells = ((0, width), np.uint8), ((0, width), np.uint16), *(((0, width), np.bool_),) * 3
    return World(  # type: ignore[call-arg]  # it counts no starred ones
        c, fixed, np.zeros(0, SEQUENCE), *(np.zeros(shape, kind) for shape, kind in cells), requests,
        asked, arrival, np.zeros((NUM_LISTS, 0), np.int32), np.zeros((16, 3), np.int32),
        np.zeros((2, NUM_BINS), np.int64), np.zeros((2, width + 1), np.int64),
    )  # fmt: skip


def with_slots(w: World, capacity: int) -> World:
    """The same replica with room for `capacity` sequences; the lowest free slot is taken first."""
    old = len(w.q)

    def longer(array: Any, axis: int = 0, size: int = capacity) -> Any:
        shape = list(array.shape)
        shape[axis] = max(size, shape[axis])
        made = np.zeros(shape, array.dtype)
        made[tuple(slice(n) for n in array.shape)] = array
        return made

    c = w.c[0]
    lists = longer(w.lists, axis=1)
    free = int(c["num_free"])
    new = np.arange(capacity - 1, old - 1, -1)
    lists[FREE, : len(new) + free] = np.concatenate([new, w.lists[FREE, :free]])
    c["num_free"] = free + len(new)
    return w._replace(
        q=longer(w.q), status=longer(w.status), evaluations=longer(w.evaluations), window=longer(w.window),
        committed=longer(w.committed), retained=longer(w.retained), lists=lists,
        counts=longer(w.counts, 1, capacity + 1),
    )  # fmt: skip


def with_queue(w: World, room: int) -> World:
    """The same replica with room for `room` more entries in its queue."""
    c, size = w.c[0], len(w.queue)
    waiting, head = int(c["num_waiting"]), int(c["queue_head"])
    if waiting + room <= size:
        return w
    while size < waiting + room:
        size *= 2
    queue = np.zeros((size, 3), np.int32)
    queue[:waiting] = w.queue[(head + np.arange(waiting)) % len(w.queue)]
    c["queue_head"] = 0
    return w._replace(queue=queue)
