"""A router whose rule is compiled: `--router examples/fleet/short_and_empty.py:ROUTER`."""

from dsim.fleet import Counters, Router, rule


@rule
def crowd(replica: Counters, tokens: int) -> float:
    """Requests, those that wait four times, and a hundredth of the KV pages."""
    return 4 * replica.num_waiting + replica.num_running + 0.01 * replica.pages_held


class ShortAndEmpty(Router):
    """The shortest queue that holds little KV."""

    load = staticmethod(crowd)


ROUTER = ShortAndEmpty
