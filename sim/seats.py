"""The replicas of a split fleet as routers and deciders see them."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..engine.engine import Engine
from ..engine.policy import Policy
from ..engine.request import Request
from .fleet import Pool
from .pool_watch import PoolWatch
from .replica import Replica
from .routers.router import RequestView


def leaves(policy: Policy, prompt: int, output: int) -> int:
    """Tokens of a request whose KV leaves the prefill pool, by kind of rows.

    Masked blocks: the prompt's whole blocks. Canvases: the whole prompt. Next tokens: all but the prompt's last token,
    from which the next is sampled.
    """
    if policy.family == "autoregressive":
        return prompt - 1
    return prompt // policy.block_length * policy.block_length if policy.granularity.on_a_grid else prompt


def _of_engine(name: str) -> Any:
    return property(lambda seat: getattr(seat.engine, name))


class Seat:
    """A replica as routers see it: requests on their way count as waiting.

    watch: None if nothing scales.
    """

    replica, num_running = _of_engine("replica"), _of_engine("num_running")
    queued_prompt_tokens = _of_engine("queued_prompt_tokens")
    pages_held, num_pages, page_size = map(_of_engine, ("pages_held", "num_pages", "page_size"))

    def __init__(self, server: Replica, pool: Pool, watch: PoolWatch | None) -> None:
        self.server, self.pool, self.watch = server, pool, watch
        self.engine: Engine = server.engine
        self.coming = 0  # requests being prefilled or sent, to decode here
        self._coming_tokens = 0  # ... tokens they should return
        self.leaving = 0  # requests prefilled here, or with KV still here
        self.asking: deque[Move] = deque()  # wait for reserved pages

    def expect(self, request: Request) -> None:
        """Count a request as on its way."""
        self.coming += 1
        self._coming_tokens += request.expected

    def expect_no_longer(self, request: Request) -> None:
        self.coming -= 1
        self._coming_tokens -= request.expected

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting + self.coming

    @property
    def expected_tokens(self) -> int:
        return self.engine.expected_tokens + self._coming_tokens

    def found(self, request: RequestView) -> int:
        prompt = request.input_length
        return self.engine.found(request.index, prompt, leaves(self.engine.policy, prompt, 0))


@dataclass(eq=False)
class Move:
    """A request on its way."""

    request: Request
    tokens: int  # that leave the prefill pool
    source: Seat
    target: Seat | None = None  # None: not chosen
    pages_kept: int = 0  # of the source since the prefill's end
    reserved: int = 0  # pages of the destination
    cached: int = 0  # tokens in the destination's prefix cache
    prefilled: bool = False
    lease: int = 0  # number of the current lease
    over: bool = False  # its request is with its decoder
