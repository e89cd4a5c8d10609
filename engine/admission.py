"""Admission: the queue, slots, KV pages and preemption."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .hooks import give_back
from .jit import rule
from .state import (
    CACHED,
    FREE,
    FREED,
    GROUP,
    IDLE,
    IGNORED,
    NEXT,
    NOTHING,
    PENDING,
    PREEMPTED,
    REJECTED,
    ROWS,
    RUNNING,
    SCRATCH,
    AnyPolicy,
    Replica,
    Sequence,
    num_arrived,
    running_slots,
    step_slots,
)


@rule
def canvas(length: int, block: int) -> int:
    """`length` rounded up to whole blocks."""
    return -(-length // block) * block


@rule
def queue_row(replica: Replica, place: int) -> int:
    """The row in `replica.queue` of a place in the queue."""
    return (replica.counters.queue_head + place) & (len(replica.queue) - 1)


@rule
def queued(replica: Replica, place: int) -> tuple[int, int]:
    """A place's request, and where a preempted one's progress is, else -1."""
    row = queue_row(replica, place)
    return int(replica.queue[row, 0]), int(replica.queue[row, 1])


@rule
def put(replica: Replica, place: int, request: int, slot: int) -> None:
    row = queue_row(replica, place)
    replica.queue[row, 0] = request
    replica.queue[row, 1] = slot


@rule
def push(replica: Replica, request: int, slot: int) -> None:
    """Queue a request last; slot: as in `queued`."""
    put(replica, replica.counters.num_waiting, request, slot)
    replica.counters.num_waiting += 1


@rule
def comes_by(replica: Replica, time: float) -> bool:
    entered = replica.counters.entered
    return bool(entered < len(replica.inbox.times) and replica.inbox.times[entered] <= time)


@rule
def enter(replica: Replica, now: float) -> None:
    inbox = replica.inbox
    while comes_by(replica, now):
        entered = replica.counters.entered
        submit(replica, int(inbox.requests[entered]), bool(inbox.fits[entered]))
        replica.counters.entered += 1


@rule
def submit(replica: Replica, request: int, fits: bool) -> None:
    """`Engine.submit` for a request of the table."""
    counters = replica.counters
    replica.requests[request].replica = replica.fixed.replica
    counters.submitted += 1
    if fits:
        push(replica, request, -1)
        prompt = replica.asked.input_length[request]
        counters.expected_tokens += prompt + replica.asked.estimate[request]
    else:
        replica.requests[request].status = REJECTED


@rule
def push_front(replica: Replica, request: int, slot: int) -> None:
    replica.counters.queue_head -= 1
    put(replica, 0, request, slot)
    replica.counters.num_waiting += 1


@rule
def move(replica: Replica, place: int, target: int) -> None:
    request, slot = queued(replica, place)
    put(replica, target, request, slot)


@rule
def unqueue(replica: Replica, slot: int) -> None:
    place = 0
    while queued(replica, place)[1] != slot:
        place += 1
    pop_at(replica, place)


@rule
def is_held(replica: Replica, place: int) -> bool:
    """Whether the discipline holds a waiting request back."""
    return bool(replica.queue[queue_row(replica, place), 3])


@rule
def pop_at(replica: Replica, place: int) -> None:
    """Take a request out of the queue, of which others keep their order."""
    while place > 0:
        move(replica, place - 1, place)
        replica.queue[queue_row(replica, place), 3] = replica.queue[queue_row(replica, place - 1), 3]
        place -= 1
    pop(replica)


@rule
def head(replica: Replica) -> tuple[int, int]:
    return queued(replica, 0)


@rule
def pop(replica: Replica) -> None:
    counters = replica.counters
    counters.queue_head += 1
    counters.num_waiting -= 1


@rule
def prefill_length(replica: Replica, request: int, slot: int) -> int:
    """Positions of a waiting request's prefill; a preempted one recomputes its tokens."""
    block = replica.fixed.block
    if slot >= 0:
        return int(replica.sequences[slot].start) + block
    return canvas(max(1, int(replica.asked.input_length[request]), num_arrived(replica, request) + 1), block)


@rule
def place(replica: Replica, request: int, slot: int, length: int, pages: int) -> int:
    """Give a waiting request a slot and pages; its first block ends at `length`."""
    counters = replica.counters
    if slot < 0:
        counters.num_free -= 1
        slot = int(replica.lists[FREE, counters.num_free])
        sequence, block = replica.sequences[slot], replica.fixed.block
        prompt = int(replica.asked.input_length[request])
        sequence.request = request
        sequence.prompt = prompt
        sequence.end = prompt + replica.asked.max_tokens[request]
        sequence.answer = prompt + replica.asked.output_length[request]
        sequence.stop = sequence.answer
        if replica.fixed.stops == IGNORED:
            sequence.stop = sequence.end
        sequence.start = length - block
        sequence.block = block
        num_pending = prompt - (length - block)
        for p in range(replica.status.shape[1]):
            replica.status[slot, p] = p < num_pending  # PENDING or MASKED
            replica.evaluations[slot, p] = 0
        sequence.emitted = 0
        sequence.expected = replica.asked.estimate[request]
        sequence.fruitless = 0
        sequence.steps = 0
        sequence.block_steps = 0
        sequence.seen_commit = False
        sequence.unpublished = True
        sequence.finished = False
        sequence.prefilled = False
        sequence.lost = False
        sequence.left = 0
    replica.sequences[slot].pages = pages
    counters.pages_held += pages
    return slot


@rule
def knows_limit(replica: Replica, sequence: Sequence) -> bool:
    """Whether the scheduler knows a sequence's limit; a request that ends at an EOS may have none."""
    return replica.fixed.eos == 0 or replica.requests[sequence.request].limited


@rule
def let_in(replica: Replica, slot: int) -> None:
    counters = replica.counters
    replica.lists[RUNNING, counters.num_running] = slot
    counters.num_running += 1


# Without pages LMDeploy of 2025 calls `preempt`, vLLM and SGLang `unseat` and `push_front`, LMDeploy 0.18 `suspend`.


@rule
def preempt(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    unseat(replica, policy, slot)
    push(replica, int(replica.sequences[slot].request), slot)


@rule
def unseat(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    give_back(replica, policy, slot)
    suspend(replica, slot)
    note_freed(replica, slot)


@rule
def note_freed(replica: Replica, slot: int) -> None:
    """Report that a sequence's request freed its pages."""
    counters = replica.counters
    replica.lists[FREED, counters.num_freed] = replica.sequences[slot].request
    counters.num_freed += 1


@rule
def suspend(replica: Replica, slot: int) -> None:
    """Stop a sequence, whatever pages it has."""
    counters, sequence = replica.counters, replica.sequences[slot]
    for p in range(replica.status.shape[1]):
        if replica.status[slot, p] == CACHED:
            replica.status[slot, p] = PENDING
    num = 0
    for other in running_slots(replica):
        if other != slot:
            replica.lists[RUNNING, num] = other
            num += 1
    counters.num_running = num
    replica.lists[PREEMPTED, counters.num_preempted] = sequence.request
    counters.num_preempted += 1
    replica.requests[sequence.request].num_preemptions += 1
    counters.preemptions += 1


@rule
def release_rows(replica: Replica, policy: AnyPolicy) -> None:
    release(replica, policy, ROWS, replica.counters.num_rows)


@rule
def release(replica: Replica, policy: AnyPolicy, kind: int, num: int) -> None:
    """Free pages and slots of finished sequences in a list's first `num`."""
    counters = replica.counters
    for i in range(num):
        slot = int(replica.lists[kind, i])
        sequence = replica.sequences[slot]
        if sequence.finished:
            give_back(replica, policy, slot)
            replica.lists[FREE, counters.num_free] = slot
            counters.num_free += 1
            note_freed(replica, slot)


@rule
def leave(replica: Replica, policy: AnyPolicy) -> None:
    """Release finished rows.

    A row of a next step that is already decided keeps its slot; its pages are free: it writes them before a new owner.
    """
    mark_next(replica, True)
    num = 0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if sequence.finished:
            leaves = not sequence.in_flight
            if leaves and sequence.pages == 0 and sequence.phase != IDLE:  # preempted during its last step
                unqueue(replica, slot)
            give_back(replica, policy, slot)  # in row order, which orders the eviction of idle pages
            if leaves:
                replica.lists[SCRATCH, num] = slot
                num += 1
        elif sequence.pages == 0:
            note_freed(replica, slot)
    mark_next(replica, False)
    release(replica, policy, SCRATCH, num)


@rule
def mark_next(replica: Replica, in_flight: bool) -> None:
    """Set `in_flight` of the rows of a step that is decided ahead."""
    if replica.counters.next_kind != NOTHING:
        for i in range(replica.counters.num_next):
            replica.sequences[replica.lists[NEXT, i]].in_flight = in_flight


@rule
def keep_rows(replica: Replica) -> None:
    """Report freed pages of rows in this step only when it ends."""
    counters = replica.counters
    if counters.num_preempted == 0:
        return
    num = 0
    for i in range(counters.num_freed):
        request = replica.lists[FREED, i]
        computed = False
        for slot in step_slots(replica):
            if replica.sequences[slot].request == request:
                computed = True
        if not computed:
            replica.lists[FREED, num] = request
            num += 1
    counters.num_freed = num


@rule
def take_next(replica: Replica) -> int:
    """Take the rows decided ahead; returns their step's kind or NOTHING."""
    counters = replica.counters
    kind = counters.next_kind
    if kind != NOTHING:
        copy_list(replica, NEXT, ROWS, counters.num_next)
        counters.num_rows = counters.num_next
        counters.next_kind = NOTHING
    return kind


@rule
def count_rows(replica: Replica, target: int, num: int) -> None:
    """Set the length of list ROWS or NEXT."""
    if target == ROWS:
        replica.counters.num_rows = num
    else:
        replica.counters.num_next = num


@rule
def drop_finished(replica: Replica) -> None:
    counters = replica.counters
    num = 0
    for slot in running_slots(replica):
        if not replica.sequences[slot].finished:
            replica.lists[RUNNING, num] = slot
            num += 1
    counters.num_running = num


@rule
def copy_list(replica: Replica, source: int, target: int, num: int) -> None:
    for i in range(num):
        replica.lists[target, i] = replica.lists[source, i]


def withdraw(arrays: Any, request: int, idles_finished: bool, give: Callable[[int], None]) -> bool:
    """Remove a waiting or running request between steps; False if it is neither.

    idles_finished: its row in a decided step is computed without effect. give: frees a slot's pages.
    """
    counters = arrays.counters[0]
    waiting = (int(counters["queue_head"]) + np.arange(int(counters["num_waiting"]))) % len(arrays.queue)
    running = arrays.lists[RUNNING, : int(counters["num_running"])]
    place = np.flatnonzero(arrays.queue[waiting, 0] == request)
    row = np.flatnonzero(arrays.sequences["request"][running] == request)
    if len(place):
        index = int(place[0])
        slot = int(arrays.queue[waiting[index], 1])
        arrays.queue[waiting[index:-1]] = arrays.queue[waiting[index + 1 :]]
        counters["num_waiting"] -= 1
    elif len(row):
        slot = int(running[row[0]])
    else:
        return False
    returned = int(arrays.requests["num_tokens"][request])
    counters["expected_tokens"] -= max(0, int(arrays.asked.estimate[request]) - returned)
    if slot < 0 or not arrays.sequences["prefilled"][slot]:
        counters["expected_tokens"] -= int(arrays.asked.input_length[request])
    if slot < 0:
        return True
    sequence = arrays.sequences[slot]
    is_planned = (
        idles_finished and counters["next_kind"] != NOTHING and slot in arrays.lists[NEXT, : int(counters["num_next"])]
    )
    for kind, count in ((RUNNING, "num_running"), (GROUP, "num_group"), (NEXT, "num_next")):
        if kind != NEXT or not is_planned:
            slots = [other for other in arrays.lists[kind, : max(0, int(counters[count]))].tolist() if other != slot]
            arrays.lists[kind, : len(slots)] = slots
            counters[count] = min(int(counters[count]), len(slots))
    if counters["num_group"] == 0:
        counters["num_group"] = -1
    if counters["num_next"] == 0:
        counters["next_kind"] = NOTHING
    if is_planned:
        arrays.sequences["finished"][slot] = arrays.sequences["prefilled"][slot] = True
        give(slot)
        return True
    if len(row) or sequence["pages"]:
        arrays.lists[FREED, int(counters["num_freed"])] = request
        counters["num_freed"] += 1
    give(slot)
    arrays.lists[FREE, int(counters["num_free"])] = slot
    counters["num_free"] += 1
    return True
