"""Admission: the queue, slots, KV pages, and preemption where pages run out."""

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
    MASKED,
    NEXT,
    NOTHING,
    PENDING,
    PREEMPTED,
    ROWS,
    RUNNING,
    SCRATCH,
)


@rule
def canvas(length: Any, block: Any) -> Any:
    """A length rounded up to whole blocks."""
    return -(-length // block) * block


@rule
def push(w: Any, request: Any, slot: Any) -> None:
    """Queue a request behind all others; `slot` holds a preempted one's progress, -1 where there is none."""
    c = w.c[0]
    at = (c.queue_head + c.num_waiting) & (len(w.queue) - 1)
    w.queue[at, 0] = request
    w.queue[at, 1] = slot
    c.num_waiting += 1


@rule
def push_front(w: Any, request: Any, slot: Any) -> None:
    """Queue a preempted request before all others."""
    c = w.c[0]
    c.queue_head -= 1
    at = c.queue_head & (len(w.queue) - 1)
    w.queue[at, 0] = request
    w.queue[at, 1] = slot
    c.num_waiting += 1


@rule
def unqueue(w: Any, slot: Any) -> None:
    """Take a preempted sequence out of the queue, wherever it waits."""
    c, last = w.c[0], len(w.queue) - 1
    at = 0
    while w.queue[(c.queue_head + at) & last, 1] != slot:
        at += 1
    while at > 0:
        for k in range(2):
            w.queue[(c.queue_head + at) & last, k] = w.queue[(c.queue_head + at - 1) & last, k]
        at -= 1
    c.queue_head += 1
    c.num_waiting -= 1


@rule
def bring_forward(w: Any, at: Any) -> None:
    """Put the request at a place in the queue before all others, which keep their order."""
    first, last = w.c[0].queue_head, len(w.queue) - 1
    for k in range(2):
        kept = w.queue[(first + at) & last, k]
        for i in range(at):
            w.queue[(first + at - i) & last, k] = w.queue[(first + at - i - 1) & last, k]
        w.queue[first & last, k] = kept


@rule
def head(w: Any) -> Any:
    """The request that is next in the queue, and the slot of its progress or -1."""
    at = w.c[0].queue_head & (len(w.queue) - 1)
    return int(w.queue[at, 0]), int(w.queue[at, 1])


@rule
def pop(w: Any) -> None:
    """Take the next request from the queue."""
    c = w.c[0]
    c.queue_head += 1
    c.num_waiting -= 1


@rule
def prefill_length(w: Any, request: Any, slot: Any) -> Any:
    """Positions that the prefill of a waiting request computes: a preempted one recomputes what it had."""
    block = int(w.f[0].block)
    if slot >= 0:
        return int(w.q[slot].start) + block
    return canvas(max(1, int(w.asked.input_length[request])), block)


@rule
def place(w: Any, request: Any, slot: Any, length: Any, pages: Any) -> Any:
    """Give a waiting request a slot and its pages; its first block is the last of `length` positions."""
    c = w.c[0]
    if slot < 0:
        c.num_free -= 1
        slot = int(w.lists[FREE, c.num_free])
        q, block, prompt = w.q[slot], int(w.f[0].block), int(w.asked.input_length[request])
        q.request = request
        q.prompt = prompt
        q.end = prompt + w.asked.max_tokens[request]
        q.answer = prompt + w.asked.output_length[request]
        q.stop = q.end if w.f[0].stops == IGNORED else q.answer
        q.start = length - block
        q.block = canvas_width(w, q)
        known = prompt - (length - block)
        for p in range(w.status.shape[1]):
            w.status[slot, p] = PENDING if p < known else MASKED
            w.evaluations[slot, p] = 0
        q.emitted = 0
        q.expected = w.asked.estimate[request]
        q.fruitless = 0
        q.steps = 0
        q.block_steps = 0
        q.seen_commit = False
        q.unpublished = True
        q.finished = False
        q.prefilled = False
        q.lost = False
        q.left = 0
    w.q[slot].pages = pages
    c.pages_held += pages
    return slot


@rule
def canvas_width(w: Any, q: Any) -> Any:
    """Positions of a sequence's canvases: the policy's, or of the narrower ones that its request asks for."""
    narrower, block = int(w.r[q.request].canvas_length), int(w.f[0].block)
    return narrower if 0 < narrower < block else block


@rule
def knows_limit(w: Any, q: Any) -> bool:
    """Whether the scheduler knows the limit of a sequence: a request that ends at an EOS may say none."""
    return w.f[0].eos == 0 or w.r[q.request].limited


@rule
def let_in(w: Any, slot: Any) -> None:
    """Count a placed request among the running ones."""
    c = w.c[0]
    w.lists[RUNNING, c.num_running] = slot
    c.num_running += 1


@rule
def preempt(w: Any, x: Any, slot: Any) -> None:
    """Take a sequence's pages; it queues again, and recomputes its KV when its turn comes."""
    unseat(w, x, slot)
    push(w, int(w.q[slot].request), slot)


@rule
def unseat(w: Any, x: Any, slot: Any) -> None:
    """Take a sequence's pages and its place among the running ones."""
    c, q = w.c[0], w.q[slot]
    give_back(w, x, slot)
    suspend(w, slot)
    w.lists[FREED, c.num_freed] = q.request
    c.num_freed += 1


@rule
def suspend(w: Any, slot: Any) -> None:
    """Take a sequence's place among the running ones; it keeps its pages."""
    c, q = w.c[0], w.q[slot]
    for p in range(w.status.shape[1]):
        if w.status[slot, p] == CACHED:
            w.status[slot, p] = PENDING
    left = 0
    for i in range(c.num_running):
        if w.lists[RUNNING, i] != slot:
            w.lists[RUNNING, left] = w.lists[RUNNING, i]
            left += 1
    c.num_running = left
    w.lists[PREEMPTED, c.num_preempted] = q.request
    c.num_preempted += 1
    w.r[q.request].num_preemptions += 1
    c.preemptions += 1


@rule
def release_rows(w: Any, x: Any) -> None:
    """A step is over: what the finished ones of its rows held comes free."""
    release(w, x, ROWS, w.c[0].num_rows)


@rule
def release(w: Any, x: Any, which: Any, num: Any) -> None:
    """Give back the pages and slots of the finished sequences among the first `num` of a list."""
    c = w.c[0]
    for i in range(num):
        slot = int(w.lists[which, i])
        q = w.q[slot]
        if q.finished:
            give_back(w, x, slot)
            w.lists[FREE, c.num_free] = slot
            c.num_free += 1
            w.lists[FREED, c.num_freed] = q.request
            c.num_freed += 1


@rule
def leave(w: Any, x: Any) -> None:
    """Where steps are decided on ahead: what finished ones hold comes free, unless the next step computes them too."""
    leave_early(w, x, False)


@rule
def leave_early(w: Any, x: Any, early: Any) -> None:
    """`leave`, where pages may be `early`: they come free although the next step computes a row of the request.

    That row writes to pages that are free; a request that takes them writes later.
    """
    c = w.c[0]
    ahead = c.num_next if c.next_kind != NOTHING else 0
    for i in range(ahead):
        w.q[w.lists[NEXT, i]].in_flight = True
    num = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if q.finished and q.in_flight:
            if early:
                give_back(w, x, slot)
        elif q.finished:
            if q.pages == 0 and q.phase != IDLE:  # it was preempted while its last step ran
                unqueue(w, slot)
            give_back(w, x, slot)  # in the order of the rows: idle pages are forgotten in it
            w.lists[SCRATCH, num] = slot
            num += 1
        elif q.pages == 0:
            w.lists[FREED, c.num_freed] = q.request
            c.num_freed += 1
    for i in range(ahead):
        w.q[w.lists[NEXT, i]].in_flight = False
    release(w, x, SCRATCH, num)


@rule
def keep_rows(w: Any) -> None:
    """Where the next step is decided on ahead: what it takes from the rows of this one comes free when that is over."""
    c = w.c[0]
    if c.num_preempted == 0:
        return
    left = 0
    for i in range(c.num_freed):
        request = w.lists[FREED, i]
        computed = False
        for k in range(c.num_rows):
            if w.q[w.lists[ROWS, k]].request == request:
                computed = True
        if not computed:
            w.lists[FREED, left] = request
            left += 1
    c.num_freed = left


@rule
def take_next(w: Any) -> Any:
    """Take the rows that were decided on ahead; the kind of their step, NOTHING where none was."""
    c = w.c[0]
    kind = c.next_kind
    if kind != NOTHING:
        copy_list(w, NEXT, ROWS, c.num_next)
        c.num_rows = c.num_next
        c.next_kind = NOTHING
    return kind


@rule
def drop_finished(w: Any) -> None:
    """Leave only those that go on among the running ones."""
    c = w.c[0]
    left = 0
    for i in range(c.num_running):
        slot = w.lists[RUNNING, i]
        if not w.q[slot].finished:
            w.lists[RUNNING, left] = slot
            left += 1
    c.num_running = left


@rule
def copy_list(w: Any, source: Any, to: Any, num: Any) -> None:
    """The first `num` entries of a list become those of another."""
    for i in range(num):
        w.lists[to, i] = w.lists[source, i]


def withdraw(w: Any, request: int, idles_finished: bool, give: Callable[[int], None]) -> bool:
    """Take a request that waits or runs out of the replica, between two steps; False where it does neither.

    idles_finished: where the next step is decided on and has a row for it, that row is computed for nothing.
    give: has a slot give back its pages, as hooks.give_back does.
    """
    c = w.c[0]
    waiting = (int(c["queue_head"]) + np.arange(int(c["num_waiting"]))) % len(w.queue)
    running = w.lists[RUNNING, : int(c["num_running"])]
    place, row = np.flatnonzero(w.queue[waiting, 0] == request), np.flatnonzero(w.q["request"][running] == request)
    if len(place):
        at = int(place[0])
        slot = int(w.queue[waiting[at], 1])
        w.queue[waiting[at:-1]] = w.queue[waiting[at + 1 :]]
        c["num_waiting"] -= 1
    elif len(row):
        slot = int(running[row[0]])
    else:
        return False
    if slot < 0:
        c["outstanding_tokens"] -= int(w.asked.input_length[request]) + int(w.asked.output_length[request])
        c["expected_tokens"] -= int(w.asked.input_length[request]) + int(w.asked.estimate[request])
        return True
    q = w.q[slot]
    unread = 0 if q["prefilled"] else q["prompt"]
    c["outstanding_tokens"] -= unread + q["answer"] - q["prompt"] - q["emitted"]
    c["expected_tokens"] -= unread + max(0, int(q["expected"]) - int(q["emitted"]))
    stays = idles_finished and c["next_kind"] != NOTHING and slot in w.lists[NEXT, : int(c["num_next"])]
    for which, count in ((RUNNING, "num_running"), (GROUP, "num_group"), (NEXT, "num_next")):
        if which != NEXT or not stays:
            left = [other for other in w.lists[which, : max(0, int(c[count]))].tolist() if other != slot]
            w.lists[which, : len(left)] = left
            c[count] = min(int(c[count]), len(left))
    if c["num_group"] == 0:
        c["num_group"] = -1
    if c["num_next"] == 0:
        c["next_kind"] = NOTHING
    if stays:
        w.q["finished"][slot] = w.q["prefilled"][slot] = True
        give(slot)
        return True
    if len(row) or q["pages"]:  # a preempted one may wait with its pages
        w.lists[FREED, int(c["num_freed"])] = request
        c["num_freed"] += 1
    give(slot)
    w.lists[FREE, int(c["num_free"])] = slot
    c["num_free"] += 1
    return True


def pages_of(length: int, page: int) -> int:
    """Pages that so many tokens take."""
    return -(-length // page)
