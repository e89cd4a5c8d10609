"""Routing: which replica takes a request as it arrives."""

from collections.abc import Callable, Sequence

from ..engine.engine import Engine
from ..engine.errors import PolicyError
from ..files.read import quoted

Router = Callable[[Sequence[Engine]], int]


def round_robin() -> Router:
    """Each replica in turn."""
    turn = -1

    def route(engines: Sequence[Engine]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(engines)
        return turn

    return route


def least_outstanding_tokens() -> Router:
    """The replica with the fewest tokens still to prefill or return; the first of equals."""
    return lambda engines: min(range(len(engines)), key=lambda i: engines[i].outstanding_tokens)


def join_shortest_queue() -> Router:
    """The replica with the fewest requests, waiting or running; the first of equals."""
    return lambda engines: min(range(len(engines)), key=lambda i: engines[i].num_waiting + engines[i].num_running)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-tokens": least_outstanding_tokens,
    "jsq": join_shortest_queue,
}


def router(name: str) -> Router:
    """A fresh router by name; PolicyError lists those there are."""
    if name not in ROUTERS:
        raise PolicyError(f"router is {quoted(name)}, expected one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
