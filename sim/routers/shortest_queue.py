"""Join the shortest queue: the replica with the fewest requests."""

from .router import Router


class ShortestQueue(Router):
    """The fewest requests, waiting or running; the first of equals."""

    least = ("num_waiting", "num_running")
