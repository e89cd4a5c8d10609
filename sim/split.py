"""Split prefill: one pool prefills a request, its KV travels over a link, another pool decodes it.

    decide -> queue and prefill (P) -> reserve pages (D) -> transfer -> queue and decode (D)

P holds its pages until the transfer or the lease ends, D from the reservation on. P returns no first token: a prompt's
tail, less than a block, is the head of the first block that D decodes (fleet.md 1).

A draining replica gets no new requests, sends what it prefilled, and decodes what is on its way to it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..engine.engine import Engine
from ..engine.journal import RequestTable
from ..engine.outside import running_code_of
from ..engine.request import Request
from ..engine.state import COMPLETED
from .clock import Clock
from .fleet import Fleet, Pool
from .link import Link, Wire
from .moves import Moves
from .pool_watch import PoolWatch
from .replica import Replica
from .routers.router import Router, restricted
from .seats import Move, Seat, leaves

# Free tokens per request of a decoding replica when pages are reserved for a new one, so that the others can grow
# (SGLang: num_reserved_decode_tokens).
SPARE_TOKENS = 512


class Split:
    """A run's requests in a fleet with links."""

    def __init__(
        self, env: Clock, fleet: Fleet, table: RequestTable, moves: Moves, new_router: Callable[..., Router]
    ) -> None:
        self._env, self._table, self._moves = env, table, moves
        self._links = {pool.name: [link for link in fleet.links if link.source == pool.name] for pool in fleet.pools}
        self._decider, self._decider_spec = fleet.deciding.decider, fleet.deciding.spec
        self._shipped = fleet.deciding.is_shipped
        self._to_prefill, self._to_decode = new_router(prefills=True), new_router()
        self._pools = fleet.pools
        self._shares = fleet.shares_where_decoded
        self._engines: dict[str, Engine] = {}  # one of each pool
        self._seats: dict[Replica, Seat] = {}
        self._sources: list[Seat] = []  # that take requests
        self._destinations: list[Seat] = []  # ...
        self._wires: dict[tuple[int, int], Wire] = {}  # by sender and link
        self._moving: dict[int, Move] = {}  # by request
        self._homeless: list[Move] = []  # without a destination

    def prefills(self, pool: Pool) -> bool:
        """Whether a pool only prefills."""
        return bool(self._links[pool.name])

    def table_of(self, pool: Pool) -> RequestTable:
        """The table that a pool's engines write."""
        return self._moves.table if self.prefills(pool) else self._table

    @property
    def idle(self) -> bool:
        """Whether no request is on its way."""
        return not self._moving

    def add(self, replica: Replica, pool: Pool, watch: PoolWatch | None) -> None:
        """Add a new replica."""
        seat = self._seats[replica] = Seat(replica, pool, watch)
        replica.awaited = lambda: seat.coming + seat.leaving > 0
        self._engines.setdefault(pool.name, replica.engine)
        if self.prefills(pool):
            self._sources.append(seat)
            replica.watch = lambda: self._prefilled(seat)
        else:
            self._destinations.append(seat)
            replica.watch = lambda: self._reserve(seat)
            self._find_homes()

    def retire(self, replica: Replica) -> None:
        """Let a replica take only requests already on their way."""
        seat = self._seats[replica]
        for seats in (self._sources, self._destinations):
            if seat in seats:
                seats.remove(seat)

    def submit(self, request: Request) -> bool:
        """Take an arriving request; False if no replica can ever serve it."""
        able = self._able(request)
        if not able:
            seats = self._destinations
            return self._hand_over(seats[self._to_decode.route(seats, request)], request)
        source = able[self._to_prefill.route(able, request)]
        tokens = _tokens(source.pool, request)
        move = self._moving[request.index] = Move(request, tokens, source)
        source.leaving += 1
        if self._link(source, self._places(source.pool, request)[0]).reserve == "early":
            self._choose(move)
        self._moves.note(
            request.index, prefill_tokens=tokens, prefill_submitted=self._env.now, prefill_turn=self._moves.next_turn()
        )
        if source.watch is not None:
            source.watch.add_requests(request.index)
        source.server.submit(_leg(request, tokens))
        if move.target is not None:
            self._reserve(move.target)
        return True

    # ---- the replicas that serve it --------------------------------------------------------------------------

    def _able(self, request: Request) -> list[Seat]:
        """Replicas that can prefill a request; empty if the decoder prefills."""
        if not request.limit or not self._splits(request):
            return []
        pools = {pool.name for pool in self._pools if self._links[pool.name] and self._can(pool, request)}
        return [seat for seat in self._sources if seat.pool.name in pools]

    def _splits(self, request: Request) -> bool:
        with running_code_of(f"decider {self._decider_spec}, asked for request {request.index}"):
            view = request if self._shipped else restricted(request)
            return bool(self._decider.splits(view, self._sources, self._destinations))

    def _can(self, pool: Pool, request: Request) -> bool:
        """Whether a pool can prefill a request for a decoder; prompts below a block never travel."""
        tokens = _tokens(pool, request)
        return tokens >= 1 and self._fits(pool.name, _leg(request, tokens)) and bool(self._places(pool, request))

    def _fits(self, pool: str, request: Request) -> bool:
        return self._engines[pool].fits(request)

    def _places(self, source: Pool, request: Request) -> list[Seat]:
        """Replicas that may decode a request prefilled by this pool."""
        pools = {link.to for link in self._links[source.name] if self._fits(link.to, request)}
        return [seat for seat in self._destinations if seat.pool.name in pools]

    def _link(self, source: Seat, target: Seat | None) -> Link:
        links = self._links[source.pool.name]
        return links[0] if target is None else next(link for link in links if link.to == target.pool.name)

    def _choose(self, move: Move) -> None:
        """Choose a request's decoder and ask it for pages."""
        places = self._places(move.source.pool, move.request)
        if not places:
            self._homeless.append(move)
            return
        target = move.target = places[self._to_decode.route(places, move.request)]
        self._table["replica"][move.request.index] = target.replica
        target.expect(move.request)
        target.asking.append(move)

    def _find_homes(self) -> None:
        """Choose decoders for moves without one."""
        moves, self._homeless = self._homeless, []
        for move in moves:
            if not move.over:
                self._choose(move)
                self._await_pages(move)

    # ---- its life --------------------------------------------------------------------------------------------

    def _prefilled(self, source: Seat) -> None:
        """Note prefills ended by a replica's last step: keep their pages, begin transfers."""
        engine, status = source.engine, self._moves.table["status"]
        for index in engine.take_done():
            move = self._moving[index]
            assert status[index] == COMPLETED, "a prefill ends"
            move.prefilled, move.pages_kept = True, engine.pages_of(move.tokens)
            engine.keep(move.pages_kept)
            self._moves.note(index, pages_kept=move.pages_kept)
            if move.reserved:
                self._transfer(move)
                continue
            if move.target is None and move not in self._homeless:
                self._choose(move)
            self._await_pages(move)

    def _await_pages(self, move: Move) -> None:
        """Reserve pages at the decoder; start the lease of the prefill pool's pages."""
        if move.prefilled:
            move.lease += 1
            lease = self._link(move.source, move.target).lease
            self._env.call(self._env.now + lease, partial(self._expire, move, move.lease))
        if move.target is not None:
            self._reserve(move.target)

    def _reserve(self, target: Seat) -> None:
        """Reserve pages for moves that ask, first come, first served."""
        while target.asking:
            move, engine = target.asking[0], target.engine
            index, prompt, page = move.request.index, move.request.input_length, engine.policy.memory.page_size
            load = engine.num_waiting + engine.num_running + target.coming - len(target.asking)
            spare = -(-max(SPARE_TOKENS * (load + 1), move.request.limit) // page) if load else 0
            if not engine.reserve(index, prompt, move.tokens, spare):
                return
            target.asking.popleft()
            move.reserved, move.cached = (int(self._table[name][index]) for name in ("reserved", "found"))
            self._moves.note(
                index, reserved=self._env.now, pages_reserved=move.reserved, reserved_step=engine.num_steps
            )
            self._moves.note_reserved(index, engine.in_step)
            if move.prefilled:
                self._transfer(move)

    def _transfer(self, move: Move) -> None:
        assert move.target is not None
        link, env, index = self._link(move.source, move.target), self._env, move.request.index
        profile, table = move.source.pool.setting.profile, self._moves.table
        took = float(table["finish"][index] - table["scheduled"][index])
        self._moves.note(index, transfer_start=env.now)
        size = link.unsent(profile, link.size(profile, move.tokens - move.cached), took)
        self._wire(move).send(size, lambda: self._received(move))

    def _wire(self, move: Move) -> Wire:
        link = self._link(move.source, move.target)
        sender = move.source.replica if link.sharing != "pool" else -1
        return self._wires.setdefault((sender, id(link)), Wire(self._env, link))

    def _received(self, move: Move) -> None:
        """A request's KV has reached its decoder."""
        self._moves.note(move.request.index, arrived=move.tokens)
        if self._shares:
            self._moves.note(move.request.index, sent=move.tokens - move.cached)
        self._end(move, replace(move.request, arrived=move.tokens))

    def _expire(self, move: Move, lease: int) -> None:
        """A lease ended before the transfer began: the decoder also prefills."""
        if move.over or move.reserved or move.lease != lease:
            return
        if move.target is None:  # no link's end: any
            move.target = self._destinations[self._to_decode.route(self._destinations, move.request)]
            move.target.expect(move.request)
        else:
            move.target.asking.remove(move)
        self._end(move, move.request)

    def _release(self, move: Move) -> None:
        """Free the prefill replica's pages."""
        source = move.source
        source.leaving -= 1
        source.engine.keep(-move.pages_kept)
        self._moves.note(move.request.index, released=self._env.now, released_step=source.engine.num_steps)
        source.server.wake()

    def _end(self, move: Move, request: Request) -> None:
        target = move.target
        assert target is not None
        self._release(move)
        target.expect_no_longer(request)
        move.over = True
        del self._moving[request.index]
        self._hand_over(target, request)

    def _hand_over(self, target: Seat, request: Request) -> bool:
        self._moves.note(request.index, submitted=self._env.now, turn=self._moves.next_turn())
        if target.watch is not None:
            target.watch.add_requests(request.index)
        return target.server.submit(request)


def _tokens(pool: Pool, request: Request) -> int:
    """Tokens that leave the prefill pool."""
    return leaves(pool.setting.policy, request.input_length, request.limit)


def _leg(request: Request, tokens: int) -> Request:
    """A request's prefill: a request for no tokens."""
    return replace(request, input_length=tokens, output_length=0, max_tokens=0, estimate=0)
