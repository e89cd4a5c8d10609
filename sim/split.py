"""Split prefill: one pool prefills a request, its KV travels over a link, another pool decodes it.

    decide -> queue and prefill (P) -> reserve pages (D) -> transfer -> queue and decode (D)

P holds its pages until the transfer ends, D from the reservation on. P returns no first token: a prompt's tail, less
than a block, is the head of the first block that D decodes (fleet.md 1).

A draining replica gets no new requests, sends what it prefilled, and decodes what is on its way to it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import MOVE_COLUMNS, SENT_COLUMNS, RequestTable
from ..engine.request import Request
from ..engine.spec import Policy
from ..engine.state import COMPLETED
from .link import Wire
from .pools import Fleet, Pool
from .replica import Replica, Timeline
from .routers.router import RequestView, Router
from .servers import AnyReplica, Receiver

# Free tokens per request of a decoding replica when pages are reserved for a new one, so that the others can grow
# (SGLang: num_reserved_decode_tokens).
SPARE_TOKENS = 512
OF_PREFILL = {"prefill_replica": "replica", "prefill_scheduled": "scheduled", "prefill_finish": "finish"}
_ZERO_AT_FIRST = ("prefill_tokens", "pages_reserved", "pages_kept", "arrived", "sent")


class Moves:
    """When and where requests were prefilled and sent: MOVE_COLUMNS, and SENT_COLUMNS with prefix caches.

    prefills: the table that prefill pools write, where each prefill is a request.
    """

    def __init__(self, num_requests: int, shares: bool) -> None:
        """shares: a decoding pool has a prefix cache."""
        kinds = dict(MOVE_COLUMNS)
        if shares:
            kinds |= SENT_COLUMNS
        self.prefills = RequestTable(num_requests)
        self._names = tuple(kinds)
        self.filled: dict[str, npt.NDArray[Any]] = {}
        for name in kinds.keys() - OF_PREFILL.keys():
            empty = {"float64": np.nan}.get(kinds[name], -1)
            if name in _ZERO_AT_FIRST:
                empty = 0
            self.filled[name] = np.full(num_requests, empty, kinds[name])

    def note(self, request: int, **values: Any) -> None:
        for name, value in values.items():
            if name in self.filled:
                self.filled[name][request] = value

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        columns = {name: self.prefills[source] for name, source in OF_PREFILL.items()} | self.filled
        return {name: columns[name] for name in self._names}


def leaves(policy: Policy, prompt: int) -> int:
    """Tokens of a request whose KV leaves the prefill pool, by kind of rows.

    Masked blocks: the prompt's whole blocks. Canvases: the whole prompt. Next tokens: all but the prompt's last token,
    from which the next is sampled.
    """
    if policy.family == "autoregressive":
        return prompt - 1
    if not policy.granularity.on_a_grid:
        return prompt
    return prompt // policy.block_length * policy.block_length


def _of_engine(name: str) -> Any:
    return property(lambda seat: getattr(seat.engine, name))


class Seat(Replica):
    """A replica of a split fleet, as routers see it: requests on their way count as waiting.

    react: called after each step.
    """

    replica, num_running = _of_engine("replica"), _of_engine("num_running")
    queued_prompt_tokens = _of_engine("queued_prompt_tokens")
    pages_held, num_pages, page_size = map(_of_engine, ("pages_held", "num_pages", "page_size"))

    def __init__(self, timeline: Timeline, engine: Engine, pool: Pool, react: Callable[["Seat"], None]) -> None:
        super().__init__(timeline, engine)
        self.pool = pool
        self._react = react
        self.coming = 0  # requests to decode here, being sent or waiting for pages
        self._coming_tokens = 0  # ... tokens they should return
        self.leaving = 0  # requests prefilled here, or with KV still here
        self.asking: deque[Move] = deque()  # wait for reserved pages

    def after_step(self) -> None:
        self._react(self)

    @property
    def awaits(self) -> bool:
        return self.coming + self.leaving > 0

    def expect(self, request: Request, change: int = 1) -> None:
        """Count a request as on its way; change -1: no longer."""
        self.coming += change
        self._coming_tokens += change * request.expected

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting + self.coming

    @property
    def expected_tokens(self) -> int:
        return self.engine.expected_tokens + self._coming_tokens

    def found(self, request: RequestView) -> int:
        prompt = request.input_length
        return self.engine.found(request.index, prompt, leaves(self.engine.policy, prompt))


@dataclass(eq=False)
class Move:
    """A request on its way."""

    request: Request
    tokens: int  # that leave the prefill pool
    source: Seat
    pages_kept: int = 0  # of the source since the prefill's end
    cached: int = 0  # tokens in the target's prefix cache


@dataclass(eq=False)
class Split(Receiver):
    """Receives a run's requests in a fleet with links. table: of the decoding pools."""

    fleet: Fleet
    table: RequestTable
    moves: Moves
    to_prefill: Router
    to_decode: Router
    _engines: dict[str, Engine] = field(default_factory=dict)  # one of each pool
    _sources: list[Seat] = field(default_factory=list)  # that take requests
    _targets: list[Seat] = field(default_factory=list)  # that take requests
    _wires: dict[tuple[int, str], Wire] = field(default_factory=dict)  # by sender and receiving pool
    _moving: dict[int, Move] = field(default_factory=dict)  # by request
    _homeless: list[Move] = field(default_factory=list)  # without a target

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return bool(self._moving)

    def new_replica(self, timeline: Timeline, engine: Engine, pool: Pool) -> Replica:
        self._engines.setdefault(pool.name, engine)
        if self.fleet.prefills(pool):
            return Seat(timeline, engine, pool, self._prefilled)
        return Seat(timeline, engine, pool, self._reserve)

    def add(self, replica: AnyReplica) -> None:
        assert isinstance(replica, Seat)
        if self.fleet.prefills(replica.pool):
            self._sources.append(replica)
            return
        self._targets.append(replica)
        moves, self._homeless = self._homeless, []
        for move in moves:
            self._find_home(move)

    def retire(self, replica: AnyReplica) -> None:
        for seats in (self._sources, self._targets):
            if replica in seats:
                seats.remove(replica)

    def submit(self, request: Request) -> bool:
        able = self._able(request)
        if not able:
            return self._hand_over(self._targets[self.to_decode.route(self._targets, request)], request)
        source = able[self.to_prefill.route(able, request)]
        tokens = _tokens(source.pool, request)
        self._moving[request.index] = Move(request, tokens, source)
        source.leaving += 1
        self.moves.note(request.index, prefill_tokens=tokens)
        source.submit(_leg(request, tokens))
        return True

    # ---- the replicas that serve a request -------------------------------------------------------------------

    def _able(self, request: Request) -> list[Seat]:
        """Replicas that can prefill a request; empty if the decoder prefills."""
        if not request.limit or not self._splits(request):
            return []
        pools = {pool.name for pool in self.fleet.pools if self.fleet.prefills(pool) and self._can(pool, request)}
        return [seat for seat in self._sources if seat.pool.name in pools]

    def _splits(self, request: Request) -> bool:
        cached = 0
        if self.fleet.least_uncached > 0:
            cached = max((target.found(request) for target in self._targets), default=0)
        return request.input_length - cached >= self.fleet.least_uncached

    def _can(self, pool: Pool, request: Request) -> bool:
        """Whether a pool can prefill a request for a decoder; prompts below a block never travel."""
        tokens = _tokens(pool, request)
        if tokens < 1 or not self._engines[pool.name].fits(_leg(request, tokens)):
            return False
        return bool(self._places(pool, request))

    def _places(self, source: Pool, request: Request) -> list[Seat]:
        """Replicas that may decode a request prefilled by this pool."""
        links = [link for link in self.fleet.links if link.source == source.name]
        pools = {link.to for link in links if self._engines[link.to].fits(request)}
        return [seat for seat in self._targets if seat.pool.name in pools]

    def _find_home(self, move: Move) -> None:
        """Choose a prefilled request's decoder and ask it for pages."""
        places = self._places(move.source.pool, move.request)
        if not places:
            self._homeless.append(move)
            return
        target = places[self.to_decode.route(places, move.request)]
        self.table["replica"][move.request.index] = target.replica
        target.expect(move.request)
        target.asking.append(move)
        self._reserve(target)

    # ---- its life --------------------------------------------------------------------------------------------

    def _prefilled(self, source: Seat) -> None:
        """Note prefills ended by a replica's last step: keep their pages, find decoders."""
        engine = source.engine
        for index in engine.take_done():
            move = self._moving[index]
            assert self.moves.prefills["status"][index] == COMPLETED, "a prefill ends"
            move.pages_kept = engine.pages_of(move.tokens)
            engine.keep(move.pages_kept)
            self.moves.note(index, pages_kept=move.pages_kept)
            self._find_home(move)

    def _reserve(self, target: Seat) -> None:
        """Reserve pages for moves that ask, first come, first served."""
        while target.asking:
            move, engine = target.asking[0], target.engine
            index, prompt, page = move.request.index, move.request.input_length, engine.policy.memory.page_size
            load = engine.num_waiting + engine.num_running + target.coming - len(target.asking)
            spare = 0
            if load:
                spare = -(-max(SPARE_TOKENS * (load + 1), move.request.limit) // page)
            if not engine.reserve(index, prompt, move.tokens, spare):
                return
            target.asking.popleft()
            move.cached = int(self.table["found"][index])
            self.moves.note(index, reserved=target.env.now, pages_reserved=self.table["reserved"][index])
            self._transfer(move, target)

    def _transfer(self, move: Move, target: Seat) -> None:
        source, index, prefills = move.source, move.request.index, self.moves.prefills
        ends = source.pool.name, target.pool.name
        link = next(link for link in self.fleet.links if (link.source, link.to) == ends)
        profile, took = source.pool.setting.profile, float(prefills["finish"][index] - prefills["scheduled"][index])
        self.moves.note(index, transfer_start=target.env.now)
        size = link.unsent(profile, link.size(profile, move.tokens - move.cached), took)
        wire = self._wires.setdefault((source.replica, link.to), Wire(target.env, link))
        wire.send(size, lambda: self._received(move, target))

    def _received(self, move: Move, target: Seat) -> None:
        """Free the prefill replica's pages, as a request's KV has reached its decoder."""
        source, index = move.source, move.request.index
        self.moves.note(index, arrived=move.tokens, sent=move.tokens - move.cached)
        source.leaving -= 1
        source.engine.keep(-move.pages_kept)
        self.moves.note(index, released=target.env.now)
        source.wake()
        target.expect(move.request, -1)
        del self._moving[index]
        self._hand_over(target, replace(move.request, arrived=move.tokens))

    def _hand_over(self, target: Seat, request: Request) -> bool:
        self.moves.note(request.index, submitted=target.env.now)
        return target.submit(request)


def _tokens(pool: Pool, request: Request) -> int:
    """Tokens that leave the prefill pool."""
    return leaves(pool.setting.policy, request.input_length)


def _leg(request: Request, tokens: int) -> Request:
    """A request's prefill: a request for no tokens."""
    return replace(request, input_length=tokens, output_length=0, max_tokens=0, estimate=0)
