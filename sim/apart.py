"""Independent replicas: each runs its own requests to the end, several at once in threads."""

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import simpy

from .clock import Clock
from .replica import Replica

AT_ONCE = 16  # replicas a batch; Ctrl-C takes effect between batches, tenths of a second apart


def run_apart(
    env: Clock, replicas: Sequence[Replica], horizon: float, threads: int
) -> Generator[simpy.Event, Any, None]:  # fmt: skip
    """Run replicas whose requests are handed over, to the end; the same as one process each, for any number of threads.

    horizon: the run's end (s), if it does not wait for all requests.
    """
    queue = [(replica.advance(env.now, -math.inf), i) for i, replica in enumerate(replicas)]  # compiles, in this thread
    heapq.heapify(queue)
    with ExitStack() as stack:
        run_all: Callable[..., Any] = map
        if threads > 1 and not any(replica.engine.is_young for replica in replicas):
            run_all = stack.enter_context(ThreadPoolExecutor(min(threads, len(replicas)))).map
        while queue:
            due: list[tuple[float, int]] = []
            # Beyond the horizon a step may never end.
            while queue and len(due) < AT_ONCE and (queue[0][0] < horizon or queue[0][0] <= env.now):
                due.append(heapq.heappop(queue))
            ends = run_all(lambda start: replicas[start[1]].advance(start[0], horizon), due)
            for (_, i), end in zip(due, list(ends), strict=True):
                replicas[i].report()
                if not replicas[i].engine.idle:
                    heapq.heappush(queue, (end, i))
            if queue:
                yield env.at(max(env.now, queue[0][0]))
    if (end := max(replica.engine.clock for replica in replicas)) > env.now:
        yield env.at(end)
