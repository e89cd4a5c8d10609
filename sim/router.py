"""Routing: which replica takes a request as it arrives."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..engine.engine import Engine
from ..engine.errors import PolicyError
from ..engine.prefix import Prefixes
from ..engine.request import Request
from ..files.read import quoted

Router = Callable[[Sequence[Engine], Request], int]

# SGLang's router as its command line sets it (sgl-model-gateway/src/main.rs, policies/cache_aware.rs).
CACHE_THRESHOLD = 0.3  # of the prompt that a replica must have seen
BALANCE_ABS_THRESHOLD = 64  # requests by which the fullest replica is ahead of the emptiest
BALANCE_REL_THRESHOLD = 1.5  # ... and how many times as many
MAX_TREE_TOKENS = 2**26 // 4  # of a replica that are remembered: it counts characters, four to a token


def round_robin(prefixes: Prefixes | None = None) -> Router:
    """Each replica in turn."""
    turn = -1

    def route(engines: Sequence[Engine], request: Request) -> int:
        nonlocal turn
        turn = (turn + 1) % len(engines)
        return turn

    return route


def least_outstanding_tokens(prefixes: Prefixes | None = None) -> Router:
    """The replica with the fewest tokens still to prefill or expected to be returned; the first of equals."""
    return lambda engines, request: min(range(len(engines)), key=lambda i: engines[i].expected_tokens)


def join_shortest_queue(prefixes: Prefixes | None = None) -> Router:
    """The replica with the fewest requests, waiting or running; the first of equals."""
    return lambda engines, request: min(range(len(engines)), key=lambda i: _requests(engines[i]))


def longest_prefix(prefixes: Prefixes | None = None) -> Router:
    """The replica that was sent most of the prompt's beginning before, as SGLang's cache-aware router has it.

    It knows what it has sent where, not what a replica has evicted. While queues differ by more than two thresholds it
    joins the shortest. Where no replica was sent enough of the prompt, and of equals, it is the one with the fewest
    tokens expected (SGLang: with the least remembered).
    """
    if prefixes is None:
        raise PolicyError("router is prefix, and nothing says what requests begin with: expected a trace")
    block, most = prefixes.block, max(1, MAX_TREE_TOKENS // prefixes.block)
    seen: list[OrderedDict[int, None]] = []  # of each replica: names, the one used longest ago first

    def route(engines: Sequence[Engine], request: Request) -> int:
        seen.extend(OrderedDict[int, None]() for _ in range(len(engines) - len(seen)))
        names = prefixes.of(request.index)[: -(-request.input_length // block)].tolist()
        queues = [_requests(engine) for engine in engines]
        ahead = max(queues) - min(queues) > BALANCE_ABS_THRESHOLD
        if ahead and max(queues) > BALANCE_REL_THRESHOLD * min(queues):
            chosen = queues.index(min(queues))
        else:
            known = [_known(names, held) * block for held in seen]
            longest = max(known) if max(known) > CACHE_THRESHOLD * request.input_length else 0
            equals = [i for i, tokens in enumerate(known) if tokens == longest or longest == 0]
            chosen = min(equals, key=lambda i: engines[i].expected_tokens)
        held = seen[chosen]
        for name in reversed(names):  # a prefix outlives what follows it
            held[name] = None
            held.move_to_end(name)
        while len(held) > most:
            held.popitem(last=False)
        return chosen

    return route


def _requests(engine: Engine) -> int:
    return engine.num_waiting + engine.num_running


def _known(names: Sequence[int], held: OrderedDict[int, None]) -> int:
    """Of these names the first ones that are held."""
    return next((i for i, name in enumerate(names) if name not in held), len(names))


BY_TOKENS = ("least-tokens", "prefix")  # routers that compare what replicas have left to do
ROUTERS: dict[str, Callable[[Prefixes | None], Router]] = {
    "round-robin": round_robin,
    "least-tokens": least_outstanding_tokens,
    "jsq": join_shortest_queue,
    "prefix": longest_prefix,
}


def router(name: str, prefixes: Prefixes | None = None) -> Router:
    """A fresh router by name; PolicyError lists those there are. prefixes: for one that goes by them."""
    if name not in ROUTERS:
        raise PolicyError(f"router is {quoted(name)}, expected one of {', '.join(ROUTERS)}")
    return ROUTERS[name](prefixes)
