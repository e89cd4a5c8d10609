"""Split prefill: a request is prefilled in one pool, its keys and values travel over a link, another pool decodes it.

    decide -> queue and prefill (P) -> reserve pages (D) -> transfer -> queue and decode (D)

P holds its pages until the transfer ends or the lease runs out, D from the reservation on. No first token comes from P:
the tail of a prompt, less than a block, is the head of the first block that D decodes (fleet.md 1).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ..engine.engine import Engine
from ..engine.journal import RequestTable
from ..engine.outside import running_code_of
from ..engine.part import Policy
from ..engine.request import Request
from .clock import Clock
from .fleet import Fleet, Pool
from .link import Link, Wire
from .moves import Moves
from .replica import Replica
from .routers.router import Router

# Tokens that stay free on a decoding replica for each request there as another one's pages are reserved, so that
# those that decode can grow (SGLang: num_reserved_decode_tokens).
SPARE_TOKENS = 512


def leaves(policy: Policy, prompt: int) -> int:
    """Tokens of a prompt whose keys and values leave the prefill pool, by the kind of rows.

    Of masked blocks whole ones; of canvases all of the prompt; of next tokens all but the last, which is computed where
    the next one is sampled.
    """
    if policy.family == "autoregressive":
        return prompt - 1
    return prompt // policy.block_length * policy.block_length if policy.granularity.on_a_grid else prompt


@dataclass(eq=False)
class _Seat:
    """A replica as a router sees it: requests on their way to it count as waiting."""

    server: Replica
    pool: Pool
    coming: int = 0  # requests that are to be decoded here and are prefilled or sent
    coming_tokens: int = 0  # ... and tokens that they are expected to return
    asking: "deque[_Move]" = field(default_factory=deque)  # moves that wait for pages to be reserved

    @property
    def engine(self) -> Engine:
        return self.server.engine

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
        return self.engine.expected_tokens + self.coming_tokens

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


@dataclass(eq=False)
class _Move:
    """A request on its way."""

    request: Request
    tokens: int  # that leave the prefill pool
    source: _Seat
    to: _Seat | None = None
    kept: int = 0  # pages of the source since the prefill's end
    prefilled: bool = False
    reserved: bool = False


class Split:
    """The requests of a fleet with links while a run lasts."""

    def __init__(
        self, env: Clock, fleet: Fleet, table: RequestTable, moves: Moves, new_router: Callable[[], Router]
    ) -> None:
        self._env, self._table, self._moves = env, table, moves
        self._links = {pool.name: [link for link in fleet.links if link.source == pool.name] for pool in fleet.pools}
        self._deciding = fleet.deciding
        self._to_prefill, self._to_decode = new_router(), new_router()
        self._pools = fleet.pools
        self._engines: dict[str, Engine] = {}  # one of each pool
        self._sources: list[_Seat] = []
        self._destinations: list[_Seat] = []
        self._wires: dict[tuple[int, int], Wire] = {}  # by sender and link
        self._moving: dict[int, _Move] = {}  # by request

    def prefills(self, pool: Pool) -> bool:
        """Whether a pool only prefills."""
        return bool(self._links[pool.name])

    def add(self, replica: Replica, pool: Pool) -> None:
        """Count in a replica, which has taken no requests yet."""
        seat = _Seat(replica, pool)
        self._engines.setdefault(pool.name, replica.engine)
        if self.prefills(pool):
            self._sources.append(seat)
            replica.watch = lambda: self._prefilled(seat)
        else:
            self._destinations.append(seat)
            replica.watch = lambda: self._reserve(seat)

    def submit(self, request: Request) -> bool:
        """Take a request as it arrives; False if no replica can ever serve it."""
        source = self._chosen_source(request)
        if source is None:
            seats = self._destinations
            return self._hand_over(seats[self._to_decode.route(seats, request)], request)
        tokens = leaves(source.pool.setting.policy, request.input_length)
        move = self._moving[request.index] = _Move(request, tokens, source)
        if self._link(source, self._places(source, request)[0]).reserve == "early":
            self._choose(move)
        self._moves.note(
            request.index, prefill_tokens=tokens, prefill_submitted=self._env.now, prefill_turn=self._moves.next_turn()
        )
        source.server.submit(_leg(request, tokens))
        if move.to is not None:
            self._reserve(move.to)
        return True

    # ---- who serves it ---------------------------------------------------------------------------------------

    def _chosen_source(self, request: Request) -> _Seat | None:
        """The replica that prefills a request; None where the replica that decodes it does."""
        if not request.limit or not self._splits(request):
            return None
        pools = {pool.name for pool in self._pools if self._links[pool.name] and self._can(pool, request)}
        able = [seat for seat in self._sources if seat.pool.name in pools]
        return able[self._to_prefill.route(able, request)] if able else None

    def _splits(self, request: Request) -> bool:
        decider, spec = self._deciding.decider, self._deciding.spec
        with running_code_of(f"decider {spec}, asked for request {request.index}"):
            return bool(decider.splits(request, self._sources, self._destinations))

    def _can(self, pool: Pool, request: Request) -> bool:
        """Whether a pool can prefill a request for one that can decode it; a prompt below a block never travels."""
        tokens = leaves(pool.setting.policy, request.input_length)
        if tokens < 1 or not self._fits(pool.name, _leg(request, tokens)):
            return False
        return any(self._fits(link.to, request) for link in self._links[pool.name])

    def _fits(self, pool: str, request: Request) -> bool:
        return self._engines[pool].fits(request)

    def _places(self, source: _Seat, request: Request) -> list[_Seat]:
        """The replicas that may decode a request that this one prefills."""
        pools = {link.to for link in self._links[source.pool.name] if self._fits(link.to, request)}
        return [seat for seat in self._destinations if seat.pool.name in pools]

    def _link(self, source: _Seat, to: _Seat) -> Link:
        return next(link for link in self._links[source.pool.name] if link.to == to.pool.name)

    def _choose(self, move: _Move) -> None:
        """Choose the replica that decodes a request; its pages are to be reserved."""
        places = self._places(move.source, move.request)
        move.to = places[self._to_decode.route(places, move.request)]
        self._table["replica"][move.request.index] = move.to.replica
        move.to.coming += 1
        move.to.coming_tokens += move.request.expected
        move.to.asking.append(move)

    # ---- its life --------------------------------------------------------------------------------------------

    def _prefilled(self, source: _Seat) -> None:
        """Note the prefills that ended with a replica's last step: their pages are kept, their transfers may begin."""
        engine, env = source.engine, self._env
        for index in engine.done:
            move = self._moving.get(index)
            if move is None or move.prefilled:
                continue
            move.prefilled, move.kept = True, engine.pages_of(move.tokens)
            engine.keep(move.kept)
            self._moves.note(index, pages_kept=move.kept)
            if move.to is None:
                self._choose(move)
            assert move.to is not None
            if move.reserved:
                self._transfer(move)
                continue
            env.call(env.now + self._link(source, move.to).lease, partial(self._expire, move))
            self._reserve(move.to)

    def _reserve(self, to: _Seat) -> None:
        """Reserve pages for the moves that ask for them, first come, first served."""
        while to.asking:
            move, engine = to.asking[0], to.engine
            pages, page = engine.pages_of(move.tokens), engine.policy.memory.page_size
            here = engine.num_waiting + engine.num_running + to.coming - len(to.asking)
            spare = -(-max(SPARE_TOKENS * (here + 1), move.request.limit) // page) if here else 0
            if pages + spare > engine.free_pages:
                return
            to.asking.popleft()
            move.reserved = True
            engine.reserve(move.request.index, pages)
            self._moves.note(
                move.request.index, reserved=self._env.now, pages_reserved=pages, reserved_step=engine.num_steps
            )
            if move.prefilled:
                self._transfer(move)

    def _transfer(self, move: _Move) -> None:
        assert move.to is not None
        link, env, index = self._link(move.source, move.to), self._env, move.request.index
        sender = move.source.replica if link.sharing != "pool" else -1
        wire = self._wires.setdefault((sender, id(link)), Wire(env, link))
        profile, table = move.source.pool.setting.profile, self._moves.table
        took = float(table["finish"][index] - table["scheduled"][index])
        self._moves.note(index, transfer_start=env.now)
        wire.send(link.left(profile, link.size(profile, move.tokens), took), lambda: self._received(move))

    def _received(self, move: _Move) -> None:
        """The keys and values of a request are where it is decoded."""
        assert move.to is not None
        self._release(move)
        self._moves.note(move.request.index, arrived=move.tokens)
        self._leave(move, move.to, replace(move.request, arrived=move.tokens))

    def _expire(self, move: _Move) -> None:
        """A lease runs out before the transfer began: the replica that was to decode the request prefills it, too."""
        if move.reserved:
            return
        assert move.to is not None
        move.to.asking.remove(move)
        self._release(move)
        self._leave(move, move.to, move.request)

    def _release(self, move: _Move) -> None:
        engine = move.source.engine
        engine.keep(-move.kept)
        self._moves.note(move.request.index, released=self._env.now, released_step=engine.num_steps)
        move.source.server.wake()

    def _leave(self, move: _Move, to: _Seat, request: Request) -> None:
        to.coming -= 1
        to.coming_tokens -= request.expected
        del self._moving[request.index]
        self._hand_over(to, request)

    def _hand_over(self, to: _Seat, request: Request) -> bool:
        self._moves.note(request.index, submitted=self._env.now, turn=self._moves.next_turn())
        return to.server.submit(request)


def _leg(request: Request, tokens: int) -> Request:
    """The prefill of a request: a request for no tokens."""
    return replace(
        request, input_length=tokens, output_length=0, max_tokens=0, canvas_length=0, estimate=0, read_only=False
    )
