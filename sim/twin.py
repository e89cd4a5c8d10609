"""The twin: a trace through the replicas of a fleet, priced by profiles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.commits import CanvasLaw, CommitDraws, CommitModel
from ..engine.engine import Engine, Limits
from ..engine.errors import PolicyError, TraceError, cut
from ..engine.journal import RequestTable, StepRecorder, StepTotals
from ..engine.latency import LatencyModel
from ..engine.prefix import caches_prefixes
from ..engine.rehearsal import rehearse
from ..engine.spec import Policy
from ..engine.state import Asked
from ..files.interrupt import asked_to_stop
from ..traces import Trace
from ..traces.prefixes import prefixes_of
from ..traces.trace import Bools, Floats, Ints
from .autoscaler import Autoscaler, Change, Fixed
from .clock import Clock
from .pool_watch import PoolWatch
from .pools import Fleet, Pool
from .routers import routing
from .servers import Members, Receiver, Routed, Servers
from .setting import Setting
from .sources import ClosedLoop, OpenLoop, Sessions, Source
from .split import Moves, Split

Append = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
Progress = Callable[[int, float], None]
CANVAS = 256  # tokens for a full-sequence model's answer of unknown length (full-sequence-diffusion.md 6)


@dataclass(frozen=True)
class RunRecords:
    """A run's result; policy, limits, commit model and law are the first pool's."""

    policy: Policy
    limits: Limits
    commit_model: CommitModel | None  # None: autoregressive
    table: RequestTable
    totals: StepTotals
    end: float  # s, simulated
    interrupted: bool
    num_made_ready: int = 0  # on a device: kernels compiled and graphs captured inside steps
    cached_tokens: Ints | None = None  # [requests] prompt tokens in a prefix cache
    law: CanvasLaw | None = None  # of forwards a block or canvas
    replica_time: float | None = None  # replica-seconds paid for, if the number changed
    changes: tuple[Change, ...] = ()  # of the number of replicas, with a scaler
    moves: dict[str, npt.NDArray[Any]] | None = None  # MOVE_COLUMNS, with links
    doubted: tuple[str, ...] = ()  # failed checks of profiles, and doubted steps that take much of the time


def simulate(
    trace: Trace,
    fleet: Fleet | Setting,
    *,
    replicas: int = 1,
    router: str = "round-robin",
    seed: int = 0,
    emit: str = "block",
    concurrency: int | None = None,
    sessions: bool = False,
    drain: bool = True,
    eos: bool = False,
    step_by_step: bool = False,
    append: Append | None = None,
    ordered: bool = True,
    progress: Progress | None = None,
) -> RunRecords:
    """Replay a trace on a fleet: open loop, or closed with `concurrency` requests in flight.

    fleet: or a setting alone, with `replicas` behind a shipped `router`. sessions: a turn is sent at its time, or when
    the turn before has ended. drain: go on after the last arrival until all is served. eos: a request's last token is
    an EOS that no policy foresees; with max_tokens, where the answer is shorter. What it ends is the policy's `eos`
    (`_past_eos`, `_on_canvases`). step_by_step: each arrival is an event of SimPy: the same, slower. append:
    receives the journal's steps in batches (STEP_COLUMNS, STEP_LISTS as values and offsets). ordered: append in the
    run's order; False, faster, keeps each replica's. progress: receives ended requests and simulated time.

    Ctrl-C ends the run early and returns the result so far.
    """
    if isinstance(fleet, Setting):
        fleet = Fleet((Pool(fleet, replicas),), routing(router))
    if concurrency is not None and concurrency < 1:
        raise TraceError(f"concurrency is {concurrency}, expected at least 1")
    fleet = fleet.with_ends().check()
    settings = [pool.setting for pool in fleet.pools]
    decoding = [pool.setting for pool in fleet.pools if not fleet.prefills(pool)]
    caches = any(caches_prefixes(setting.policy) for setting in settings)
    prefixes, cached = None, None
    if caches or fleet.routing.kind.goes_by_prefix:
        prefixes = prefixes_of(trace)
    if prefixes is not None and caches:
        cached = prefixes.cached
    trace, missed = _with_missed_eos(trace, decoding, eos)
    for setting in decoding:
        check_fit(trace, setting.limits, setting.policy)
    for setting in settings:
        rehearse(setting.policy, setting.limits, map(trace.request, range(len(trace))), setting.profile.latency)
    step_models = []
    for setting in settings:
        draws = setting.draws(seed, trace)
        if isinstance(draws, CommitDraws):
            draws.miss_eos(missed, trace.max_tokens > 0)
        step_models.append(setting.step_model(draws))
    due, closed = trace.arrival, concurrency is not None or sessions  # requests come when others have ended
    if concurrency is not None:
        due = np.zeros(len(trace))
    table = RequestTable(len(trace), None if closed else trace.arrival, Asked(*trace.lengths))
    moves = None
    tables = [table] * len(fleet.pools)
    if fleet.links:
        moves = Moves(len(trace), fleet.shares_where_decoded)
        tables = [moves.prefills if fleet.prefills(pool) else table for pool in fleet.pools]
    env, recorder = Clock(), None
    if append is not None:
        recorder = StepRecorder(append, max(setting.policy.width for setting in settings))
    ended = 0

    def finished(num: int, now: float) -> None:
        nonlocal ended
        ended += num
        source.ended(num)
        if progress is not None:
            progress(ended, now)

    firsts: dict[str, Engine] = {}

    def new_engine(pool: Pool, table: RequestTable, number: int) -> Engine:
        like = firsts.get(pool.name)
        engine = pool.setting.engine(table, replica=number, emit=emit, eos=eos, prefixes=prefixes, like=like)
        firsts.setdefault(pool.name, engine)
        return engine

    new_router = partial(fleet.routing.new, prefixes, seed=seed)
    receiver: Receiver = Routed(new_router())
    if moves is not None:
        receiver = Split(
            fleet=fleet, table=table, moves=moves, to_prefill=new_router(prefills=True), to_decode=new_router()
        )
    frontend = settings[0].profile.frontend
    source: Source
    if concurrency is not None:
        source = ClosedLoop(env, trace, receiver.submit, concurrency, frontend)
    elif sessions:
        source = Sessions(env, trace, table, receiver.submit, drain, frontend)
    else:
        source = OpenLoop(env, trace, receiver.submit, drain, frontend)
    in_order = ordered and append is not None and (fleet.num_replicas > 1 or fleet.scaling is not None)
    servers = Servers(
        env,
        fleet,
        receiver,
        source,
        tables=tables,
        step_models=step_models,
        new_engine=new_engine,
        recorder=recorder,
        finished=finished,
        ahead=not (closed or step_by_step or in_order),
    )
    servers.start()
    scaler = Fixed()
    if fleet.scaling is not None:
        scaler = Autoscaler(env, servers, receiver, fleet.scaling, partial(watch_of, fleet, moves, due))
    interrupted = False
    try:
        with asked_to_stop(env.stop):
            last = source.start()
            env.run(None if drain else last)
    except KeyboardInterrupt:
        interrupted = True
    interrupted = interrupted or env.stopping  # it may have come with the last event
    if recorder is not None:
        recorder.flush()
    first, totals = settings[0], servers.totals
    paid = scaler.replica_time(totals.end)
    servers.close()
    return RunRecords(
        policy=first.policy,
        limits=first.limits,
        commit_model=first.commits,
        table=table,
        totals=totals,
        end=env.now,
        interrupted=interrupted,
        cached_tokens=cached,
        law=first.law,
        replica_time=paid,
        changes=tuple(scaler.changes),
        moves=None if moves is None else moves.columns,
    )


def watch_of(fleet: Fleet, moves: Moves | None, due: Floats, members: Members) -> PoolWatch:
    """What a scaler sees of a pool. due: as in PoolWatch."""
    if moves is None:
        return PoolWatch(members, due)
    if fleet.prefills(members.pool):
        return PoolWatch(members, due, role="prefill")
    return PoolWatch(members, due, moves.filled["submitted"], "decode")


def _with_missed_eos(trace: Trace, settings: list[Setting], eos: bool) -> tuple[Trace, Bools]:
    """The trace as the policies serve it with EOS ends (`_past_eos`, `_on_canvases`); all must serve it alike."""
    outcomes = []
    for policy in (setting.policy for setting in settings):
        if policy.family == "block-diffusion" and policy.unmasking.eos == "block":
            outcomes.append(_past_eos(trace, policy.block_length, eos))
        else:
            served = trace
            if eos and policy.family == "full-sequence":
                served = _on_canvases(trace)
            outcomes.append((served, np.zeros(len(trace), np.bool_)))
    served, missed = outcomes[0]
    if any(not np.array_equal(served.lengths, other.lengths) for other, _ in outcomes[1:]):
        names = " and ".join(cut(setting.policy.name) for setting in settings)
        raise PolicyError(f"{names} end requests at different EOS, expected pools that end them at the same")
    return served, missed


def _past_eos(trace: Trace, block: int, eos: bool) -> tuple[Trace, Bools]:
    """The trace as LMDeploy serves it if requests end at an EOS, and the requests that this changes.

    An EOS stops a request with its block, as a limit does. LMDeploy ignores one in the block that the prompt ends in
    (block-diffusion.md 1.6): the request goes on to the next block's first position, all padding, if its limit allows.
    eos: requests without a limit also end at an EOS.
    """
    partial, answer, limit = -trace.input_length % block, trace.output_length, trace.max_tokens
    ends = (limit > answer) | ((limit == 0) & eos)
    missed = ends & (partial > 0) & (answer > 0) & (answer <= partial) & ((limit == 0) | (limit > partial))
    if not missed.any():
        return trace, missed  # nothing is copied
    return replace(trace, output_length=np.where(missed, partial + 1, answer)), missed


def _on_canvases(trace: Trace) -> Trace:
    """The trace with limits: a full-sequence model, which does not foresee an EOS, sets its canvas in advance."""
    limit = np.where(trace.max_tokens > 0, trace.max_tokens, np.maximum(trace.output_length, CANVAS))
    return replace(trace, extras={**trace.extras, "max_tokens": limit.tolist()})


def check_fit(trace: Trace, limits: Limits, policy: Policy) -> None:
    """TraceError unless some request could ever be served."""
    engine = Engine(policy, limits, RequestTable(0), latency=LatencyModel(((0.0, 0.0),), 0.0))
    if any(engine.fits(trace.request(i)) for i in range(len(trace))):
        return
    i = int(np.argmin(trace.input_length + trace.limit))
    length, pages = int(trace.input_length[i] + trace.limit[i]), sum(engine.most_pages(trace.request(i)))
    raise TraceError(
        f"{trace.name}: none of its {len(trace)} requests fits into a step of {cut(policy.name)}, the context of "
        f"{limits.context_limit} tokens and {limits.num_pages} pages of {policy.memory.page_size}: the shortest has "
        f"{length} tokens ({pages} pages)"
    )
