"""Threads that share the replicas of one compiled call, in rounds: each claims some to run, its own first.

A thread without replicas left claims those of the others. So a thread that the system stopped delays a round only if it
was running replicas.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .jit import rule
from .numba_parts import add, tell, told

SHARE = 8  # places claimed together; a cache line of `Replicas.due` has as many
LINE = 8  # numbers of a cache line, which one thread writes often
ROUND = 1 << 32  # above all claims of a round
OVER = -(1 << 62)
NO_CODE = 1 << 62
NOWHERE = 1 << 62  # above all places
NUM_RUN, CODE = 0, 1  # a thread's numbers in `Team.done`


class Team(NamedTuple):
    """Arrays that the threads of a call share. Of n threads, thread i has shares i, i + n, i + 2 n ...; 0 leads."""

    share: int  # places of a share
    turns: npt.NDArray[np.int64]  # [threads * LINE] round * ROUND + claims of a thread's shares; below 0: no round
    done: npt.NDArray[np.int64]  # [threads * LINE] NUM_RUN: shares run so far; CODE: the lowest of `core._run_share`
    times: npt.NDArray[np.float64]  # [2] s, of the round: run what is due by the first or before the second
    bins: npt.NDArray[np.int64]  # [at least threads, 2, NUM_BINS] as Replica.bins


def team_of(threads: int, bins: npt.NDArray[np.int64]) -> Team:
    """A team before its first call. Alone, all is one share."""
    kind: Any = Team
    made: Team = kind(
        SHARE if threads > 1 else 1 << 31, np.zeros(threads * LINE, np.int64), np.zeros(threads * LINE, np.int64),
        np.zeros(2), bins,
    )  # fmt: skip
    begin_call(made)
    return made


@rule
def num_threads(team: Team) -> int:
    return len(team.turns) // LINE


def begin_call(team: Team) -> None:
    """Forget the calls before; no other thread may be in them."""
    team.turns[:] = ROUND - 1  # nothing to claim yet
    team.done[:] = 0
    team.done[CODE::LINE] = NO_CODE


@rule
def forget_codes(team: Team) -> None:
    """Between two rounds, thread 0."""
    for thread in range(num_threads(team)):
        team.done[thread * LINE + CODE] = NO_CODE


@rule
def begin_round(team: Team, now: float, horizon: float) -> None:
    """Let all threads claim shares; thread 0."""
    team.times[0], team.times[1] = now, horizon
    begun = (team.turns[0] // ROUND + 1) * ROUND
    for thread in range(num_threads(team)):
        tell(team.turns, thread * LINE, begun)


@rule
def await_round(team: Team, thread: int, places: int) -> bool:
    """Wait until shares of this thread can be claimed; False when the call is over."""
    while True:
        turn = told(team.turns, thread * LINE)
        if turn < 0:
            return False
        if _first(team, thread, turn) < places:
            return True


@rule
def claim(team: Team, thread: int, places: int) -> int:
    """The first place of a share that no thread has claimed in this round; -1: there is none."""
    threads = num_threads(team)
    for k in range(threads):
        owner = (thread + k) % threads
        if _first(team, owner, told(team.turns, owner * LINE)) < places:
            first = _first(team, owner, add(team.turns, owner * LINE, 1))
            if first < places:
                return int(first)
    return -1


@rule
def _first(team: Team, owner: int, turn: int) -> int:
    """The first place of an owner's next share; past all places if there is no round."""
    return (owner + turn % ROUND * num_threads(team)) * team.share if turn >= 0 else NOWHERE


@rule
def note_run(team: Team, thread: int, code: int) -> None:
    """Say that a claimed share was run, with this code; -1: all of it."""
    at = thread * LINE
    if code >= 0:
        team.done[at + CODE] = min(team.done[at + CODE], code)
    tell(team.done, at + NUM_RUN, team.done[at + NUM_RUN] + 1)


@rule
def end_round(team: Team, places: int) -> int:
    """Wait until all shares were run; the lowest code or -1. Thread 0, when it can claim no more."""
    threads = num_threads(team)
    shares = -(-places // team.share) * (team.turns[0] // ROUND)
    while True:
        run = 0
        for thread in range(threads):
            run += told(team.done, thread * LINE + NUM_RUN)
        if run == shares:
            break
    code = NO_CODE
    for thread in range(threads):
        code = min(code, team.done[thread * LINE + CODE])
    return int(code) if code < NO_CODE else -1


def end_call(team: Team) -> None:
    """Have the other threads return."""
    team.turns[LINE::LINE] = OVER
