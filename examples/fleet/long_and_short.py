"""A compiled decider: `--decider examples/fleet/long_and_short.py:DECIDER,tokens=1000`."""

from dataclasses import dataclass
from typing import Any

from dsim.fleet import Decider, rule


@rule
def shortest(replicas: Any) -> int:
    """The fewest requests that wait at a replica."""
    least = 1 << 30
    for k in range(len(replicas)):
        least = min(least, replicas[k].num_waiting)
    return least


@rule
def long_and_short(request: Any, prefill: Any, decode: Any, settings: Any) -> bool:
    """Long prompts, unless the prefill pool's queues are longer than those of the decoding replicas."""
    return request.input_length >= settings.tokens and shortest(prefill) <= shortest(decode)


@dataclass(frozen=True)
class LongAndShort(Decider):
    """`examples/fleet/decider.py`, compiled."""

    tokens: int = 1000
    decision = long_and_short


DECIDER = LongAndShort
