"""A run's moves: when and where requests were prefilled and sent, and attempts cut short by failures."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.journal import (
    APART,
    BLOCK_COLUMNS,
    MOVE_COLUMNS,
    REQUEST_COLUMNS,
    SENT_COLUMNS,
    TURN_COLUMNS,
    RequestTable,
)
from ..engine.request import Request
from ..engine.state import CANCELLED

# Times that clients saw: they outlast a failed replica.
SEEN = ("first_commit", "first_block", "first_emission")
OF_PREFILL = {"prefill_replica": "replica", "prefill_scheduled": "scheduled", "prefill_finish": "finish"}
_KINDS = MOVE_COLUMNS | SENT_COLUMNS | BLOCK_COLUMNS
_FRESH = {name: np.nan if kind == "float64" else -1 for name, kind in _KINDS.items()} | dict.fromkeys(
    (
        "prefill_tokens",
        "pages_reserved",
        "pages_kept",
        "arrived",
        "sent",
        "reserved_in_step",
        "returned_in_step",
        "upto",
    ),
    0,
)
OF_DESTINATION = (
    "reserved", "pages_reserved", "transfer_start", "reserved_step", "returned_step", "reserved_turn",
    "reserved_in_step", "returned_turn", "returned_in_step",
)  # fmt: skip
_FRESH_ROW = RequestTable(1).rows[0]


class Moves:
    """Fills MOVE_COLUMNS, and holds the prefill pools' table, where each prefill is a request.

    links: False: only TURN_COLUMNS. shares: a decoding pool has a prefix cache (SENT_COLUMNS). by_block: requests move
    once a block (BLOCK_COLUMNS).
    """

    def __init__(self, requests: RequestTable, links: bool, shares: bool = False, by_block: bool = False) -> None:
        num = len(requests.rows)
        self.table = RequestTable(num if links else 0)
        self.cut_short: list[dict[str, Any]] = []  # columns of attempts ended by failures
        self._requests, self._links = requests, links
        self._names = (
            *(MOVE_COLUMNS if links else TURN_COLUMNS), *(SENT_COLUMNS if shares else ()),
            *(BLOCK_COLUMNS if by_block else ()),
        )  # fmt: skip
        self._filled = {
            name: np.full(num, _FRESH[name], _KINDS[name]) for name in self._names if name not in OF_PREFILL
        }
        self._seen: dict[int, tuple[float, ...]] = {}  # SEEN of resent requests
        self._starts: dict[int, Any] = {}  # a request's row when its block began to wait
        self._scheduled: dict[int, float] = {}  # of requests with a complete first block
        self._turns = 0

    def note(self, request: int, **values: Any) -> None:
        for name, value in values.items():
            self._filled[name][request] = value

    def note_pages(self, request: int, name: str, in_step: bool) -> None:
        """Set when a prefix cache's pages were `reserved` or `returned`, in order of changes."""
        if f"{name}_turn" in self._filled:
            self.note(request, **{f"{name}_turn": self.next_turn(), f"{name}_in_step": in_step})

    def next_turn(self) -> int:
        """Turn of a request handed to a replica now."""
        self._turns += 1
        return self._turns - 1

    def take_turns(self, requests: range) -> None:
        """Note that these requests went to replicas now, in this order."""
        if requests:
            self._filled["turn"][requests.start : requests.stop] = np.arange(self._turns, self._turns + len(requests))
            self._turns += len(requests)

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Current MOVE_COLUMNS or TURN_COLUMNS."""
        return {
            name: self.table[OF_PREFILL[name]] if name in OF_PREFILL else self._filled[name] for name in self._names
        }

    # ---- requests that move once a block ----------------------------------------------------------------------

    def begin_block(self, request: Request, upto: int) -> None:
        """A request's block waits for its pass: the first, the next, or one cut short by a failure."""
        index, rows = request.index, self._requests.rows
        if index not in self._starts:
            self._starts[index] = rows[index].copy()
        if np.isnan(self._filled["began"][index]):
            self.note(index, began=request.arrival)
        self.note(index, upto=upto)

    def leave(self, request: int, now: float) -> None:
        """A request's block is complete; the next waits."""
        row = self._requests.rows[request]
        self._scheduled.setdefault(request, float(row["scheduled"]))
        self.cut_short.append(self._row(request) | {"begun": row["scheduled"], "left": now})
        row["scheduled"], row["arrived"] = np.nan, 0
        self._clear(request)
        self.note(request, began=now)
        self._starts[request] = row.copy()

    def _clear(self, request: int) -> None:
        for name in self._filled:
            self._filled[name][request] = _FRESH[name]
        if self._links:
            self.table.rows[request] = _FRESH_ROW

    # ---- attempts that failures cut short --------------------------------------------------------------------

    def cut(self, request: int, now: float) -> None:
        """Record an attempt ended by a failure; the request begins again."""
        table = self._requests
        times = tuple(float(table[name][request]) for name in SEEN)
        self._seen[request] = tuple(np.fmin(self._seen.get(request, times), times).tolist())
        row = self._row(request) | {"status": CANCELLED, "finish": now}
        if "begun" in self._filled:
            row["begun"] = row["scheduled"]
        self.cut_short.append(row)
        table.rows[request] = self._starts.get(request, _FRESH_ROW)
        self._clear(request)
        if "began" in self._filled:  # a block's time goes on
            self.note(request, began=row["began"])

    def cut_destination(self, request: int, now: float) -> None:
        """Record pages reserved for a request that goes elsewhere; it stays prefilled."""
        row = self._row(request) | {"status": CANCELLED, "finish": now}
        self.cut_short.append(row | {name: _FRESH[name] for name in self._names if name not in OF_DESTINATION})
        for name in OF_DESTINATION:
            if name in self._filled:
                self._filled[name][request] = _FRESH[name]

    def _row(self, request: int) -> dict[str, Any]:
        table = self._requests
        apart = {"request": request, "arrival": table.arrival[request]}
        apart |= {name: column[request] for name, column in table.asked._asdict().items()}
        own = {name: apart[name] if name in APART else table[name][request] for name in REQUEST_COLUMNS}
        moved = {name: column[request] for name, column in self.columns.items()}
        return own | moved

    def restore_seen(self) -> None:
        """Restore first times of requests that were resent or move once a block."""
        if "begun" in self._filled:
            self._filled["begun"][:] = self._requests["scheduled"]
        for request, time in self._scheduled.items():
            self._requests["scheduled"][request] = time
        for request, times in self._seen.items():
            for name, time in zip(SEEN, times, strict=True):
                self._requests[name][request] = np.fmin(self._requests[name][request], time)

    @property
    def attempts(self) -> dict[str, npt.NDArray[Any]]:
        """Attempts cut short, in the order of their ends."""
        kinds = REQUEST_COLUMNS | {name: _KINDS[name] for name in self._names}
        return {name: np.array([row[name] for row in self.cut_short], kind) for name, kind in kinds.items()}
