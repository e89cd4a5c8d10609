"""A router that sends long prompts to the last replica: `--router examples/fleet/long_apart.py:ROUTER,long=2000`."""

from collections.abc import Sequence
from typing import Any

from dsim.fleet import ReplicaView, RequestView, Router


class LongApart(Router):
    """Long prompts go to the last replica, and short ones to the shortest queue of the others."""

    settings = {"long": int}  # noqa: RUF012

    def __init__(self, prefixes: Any = None, long: int = 4000) -> None:
        super().__init__(prefixes)
        self.long = long

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        last = len(replicas) - 1
        if request.input_length >= self.long or not last:
            return last
        return min(range(last), key=lambda i: replicas[i].num_waiting + replicas[i].num_running)


ROUTER = LongApart
