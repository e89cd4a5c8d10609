"""Replicas that nothing from outside touches: each runs the requests that it will take, several at once in threads."""

import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import simpy

from .clock import Clock
from .replica import Replica


def run_apart(
    env: Clock, replicas: Sequence[Replica], horizon: float, threads: int
) -> Generator[simpy.Event, Any, None]:  # fmt: skip
    """Run replicas whose requests are handed over, to the end; the same as one process each, for any number of threads.

    horizon: the run's end (s), if it does not wait for all requests.
    """
    going = list(replicas)
    until = [replica.advance(env.now, -math.inf) for replica in going]  # compiles, in this thread
    with ExitStack() as stack:
        run_all: Callable[..., Any] = map
        if threads > 1 and not any(replica.engine.is_young for replica in going):
            run_all = stack.enter_context(ThreadPoolExecutor(min(threads, len(going)))).map
        while going:
            # Beyond the horizon a step may never end.
            due = [i for i, time in enumerate(until) if time < horizon or time <= env.now]
            ends = run_all(Replica.advance, [going[i] for i in due], [until[i] for i in due], repeat(horizon))
            for i, end in zip(due, list(ends), strict=True):
                until[i] = end
            for replica in going:
                replica.report()
            left = [i for i, replica in enumerate(going) if not replica.engine.idle]
            going, until = [going[i] for i in left], [until[i] for i in left]
            if going and min(until) > env.now:
                yield env.at(min(until))
    if (end := max(replica.engine.clock for replica in replicas)) > env.now:
        yield env.at(end)
