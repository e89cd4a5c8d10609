"""The replicas of a split fleet as routers and deciders see them: one by one, or as records."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.fleet_rules import Coming, ReplicaFigures
from ..engine.policy import Policy
from ..engine.records import dtype_of, table
from ..engine.request import Request
from ..engine.state import COUNTERS
from .fleet import Pool
from .link import Transfer
from .pool_watch import PoolWatch
from .replica import Replica
from .routers.router import RequestView


def leaves(policy: Policy, prompt: int, output: int) -> int:
    """Tokens of a request whose KV leaves the prefill pool, by kind of rows.

    Masked blocks: the prompt's whole blocks. Canvases: the whole prompt. Next tokens: all but the prompt's last token,
    from which the next is sampled. Full-sequence: prompt and all blocks, masks included.
    """
    if policy.cache.separable:
        return policy.batching.length(policy, prompt, output)
    if policy.family == "autoregressive":
        return prompt - 1
    return prompt // policy.block_length * policy.block_length if policy.granularity.on_a_grid else prompt


class Board:
    """The numbers of all replicas, by place; engines write their counters into it."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._own: npt.NDArray[Any] = np.zeros(0, COUNTERS)
        self.counters: Any = table(self._own)  # [places] state.Counters
        self.coming: Any = table(np.zeros(0, dtype_of(Coming)))

    def add(self, engine: Engine) -> int:
        """Add an engine; returns its place."""
        at = len(self._engines)
        self._engines.append(engine)
        if at < len(self._own):
            engine.join(self._own[at : at + 1])
            return at
        more = max(16, at)
        self._own = np.zeros(at + more, COUNTERS)
        self.counters = table(self._own)
        self.coming = table(np.concatenate([self.coming, np.zeros(more, dtype_of(Coming))]))
        for place, each in enumerate(self._engines):
            each.join(self._own[place : place + 1])
        return at


class Seat:
    """A replica as routers see it: requests on their way count as waiting.

    watch: None if nothing scales.
    """

    def __init__(self, server: Replica, pool: Pool, watch: PoolWatch | None, board: Board) -> None:
        self.server, self.pool, self.watch = server, pool, watch
        self.engine: Engine = server.engine
        self.coming = 0  # requests being prefilled or sent, to decode here
        self._coming_tokens = 0  # ... tokens they should return
        self.leaving = 0  # requests prefilled here, or with KV still here
        self.promised = 0  # ... their pages, if they wait for some elsewhere until then
        self.asking: deque[Move] = deque()  # wait for reserved pages
        self._board, self.place = board, board.add(server.engine)

    def expect(self, request: Request) -> None:
        """Count a request as on its way."""
        self._count(1, request.expected)

    def expect_no_longer(self, request: Request) -> None:
        self._count(-1, -request.expected)

    def _count(self, requests: int, tokens: int) -> None:
        self.coming += requests
        self._coming_tokens += tokens
        self.note_coming()

    def note_coming(self) -> None:
        """Write what waits outside the engine's queue onto the board: requests on their way, and for KV of a tier."""
        self._board.coming[self.place] = self.coming + len(self.engine.deferred), self._coming_tokens

    @property
    def replica(self) -> int:
        return self.engine.replica

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting + self.coming

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def expected_tokens(self) -> int:
        return self.engine.expected_tokens + self._coming_tokens

    @property
    def queued_prompt_tokens(self) -> int:
        return self.engine.queued_prompt_tokens

    @property
    def pages_held(self) -> int:
        return self.engine.pages_held

    @property
    def num_pages(self) -> int:
        return self.engine.num_pages

    @property
    def page_size(self) -> int:
        return self.engine.page_size

    def found(self, request: RequestView) -> int:
        prompt = request.input_length
        return self.engine.found(request.index, prompt, leaves(self.engine.policy, prompt, 0))


class Seats(list[Seat]):
    """Seats by number, with their figures as records; never changed, but made anew."""

    def __init__(self, board: Board, seats: Iterable[Seat] = ()) -> None:
        super().__init__(seats)
        self.board = board

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """[replicas] on the board."""
        return np.array([seat.place for seat in self], np.int64)

    @cached_property
    def records(self) -> Any:
        """[replicas] ReplicaFigures; a rule that is asked writes those that change."""
        made = np.zeros(len(self), dtype_of(ReplicaFigures))
        for name in ("replica", "num_pages", "page_size"):
            made[name] = [getattr(seat, name) for seat in self]
        return table(made)

    @cached_property
    def _deferring(self) -> list[Seat]:
        return [seat for seat in self if seat.engine.watched]

    def note_deferred(self) -> None:
        """Write onto the board what waits for KV of a lower tier."""
        for seat in self._deferring:
            seat.note_coming()


@dataclass(eq=False)
class Move:
    """A request on its way."""

    request: Request
    tokens: int  # that leave the prefill pool
    source: Seat
    to: Seat | None = None  # None: not chosen
    kept: int = 0  # pages of the source since the prefill's end
    reserved: int = 0  # pages of the destination
    found: int = 0  # tokens in the destination's prefix cache
    prefilled: bool = False
    transfer: Transfer | None = None  # under way
    lease: int = 0  # number of the current lease
    over: bool = False  # goes another way, or is lost
