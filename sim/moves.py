"""The moves of a run: when and where each request was prefilled and sent, and the attempts that failures cut short."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.journal import APART, MOVE_COLUMNS, REQUEST_COLUMNS, SENT_COLUMNS, TURN_COLUMNS, RequestTable
from ..engine.state import CANCELLED

# Times of a request that its client has seen, whatever becomes of the replica.
SEEN = ("first_commit", "first_block", "first_emission")
OF_PREFILL = {"prefill_replica": "replica", "prefill_scheduled": "scheduled", "prefill_finish": "finish"}
_KINDS = MOVE_COLUMNS | SENT_COLUMNS
_FRESH = {name: np.nan if kind == "float64" else -1 for name, kind in _KINDS.items()} | dict.fromkeys(
    ("prefill_tokens", "pages_reserved", "pages_kept", "arrived", "sent", "reserved_in_step", "returned_in_step"), 0
)
OF_DESTINATION = (
    "reserved", "pages_reserved", "transfer_start", "reserved_step", "returned_step", "reserved_turn",
    "reserved_in_step", "returned_turn", "returned_in_step",
)  # fmt: skip
_FRESH_ROW = RequestTable(1).rows[0]


class Moves:
    """Fills MOVE_COLUMNS, and holds the request table of the prefill pools, where each prefill is a request.

    table: of the requests. links: without them the columns are TURN_COLUMNS alone. shares: a pool that decodes has a
    prefix cache, and SENT_COLUMNS are filled, too.
    """

    def __init__(self, requests: RequestTable, links: bool, shares: bool = False) -> None:
        num = len(requests.rows)
        self.table = RequestTable(num if links else 0)
        self.cut_short: list[dict[str, Any]] = []  # the columns of each attempt that a failure ended
        self._requests, self._links = requests, links
        self._names = (*(MOVE_COLUMNS if links else TURN_COLUMNS), *(SENT_COLUMNS if shares else ()))
        self._filled = {
            name: np.full(num, _FRESH[name], _KINDS[name]) for name in self._names if name not in OF_PREFILL
        }
        self._seen: dict[int, tuple[float, ...]] = {}  # SEEN of requests that are sent again
        self._turns = 0

    def note(self, request: int, **values: Any) -> None:
        """Set columns of a request."""
        for name, value in values.items():
            self._filled[name][request] = value

    def note_pages(self, request: int, name: str, in_step: bool) -> None:
        """Set when a prefix cache's pages were `reserved`, or `returned`, in the order of all that changes one."""
        if f"{name}_turn" in self._filled:
            self.note(request, **{f"{name}_turn": self.next_turn(), f"{name}_in_step": in_step})

    def next_turn(self) -> int:
        """The place of a request that is handed to a replica now, in the order of all of them."""
        self._turns += 1
        return self._turns - 1

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The current values of MOVE_COLUMNS, or of TURN_COLUMNS."""
        return {
            name: self.table[OF_PREFILL[name]] if name in OF_PREFILL else self._filled[name] for name in self._names
        }

    # ---- attempts that failures cut short --------------------------------------------------------------------

    def cut(self, request: int, now: float) -> None:
        """Keep what became of an attempt that a failure ends; the request begins again."""
        table = self._requests
        times = tuple(float(table[name][request]) for name in SEEN)
        self._seen[request] = tuple(np.fmin(self._seen.get(request, times), times).tolist())
        self.cut_short.append(self._row(request, now))
        table.rows[request] = _FRESH_ROW
        for name in self._filled:
            self._filled[name][request] = _FRESH[name]
        if self._links:
            self.table.rows[request] = _FRESH_ROW

    def cut_destination(self, request: int, now: float) -> None:
        """Keep what became of the pages reserved for a request that goes elsewhere, prefilled as it is."""
        row = self._row(request, now)
        self.cut_short.append(row | {name: _FRESH[name] for name in self._names if name not in OF_DESTINATION})
        for name in OF_DESTINATION:
            if name in self._filled:
                self._filled[name][request] = _FRESH[name]

    def _row(self, request: int, now: float) -> dict[str, Any]:
        table = self._requests
        apart = {"request": request, "arrival": table.arrival[request]}
        apart |= {name: column[request] for name, column in table.asked._asdict().items()}
        own = {name: apart[name] if name in APART else table[name][request] for name in REQUEST_COLUMNS}
        moved = {name: column[request] for name, column in self.columns.items()}
        return own | moved | {"status": CANCELLED, "finish": now}

    def restore_seen(self) -> None:
        """Set the first times of requests that were sent again to those that their clients saw."""
        for request, times in self._seen.items():
            for name, time in zip(SEEN, times, strict=True):
                self._requests[name][request] = np.fmin(self._requests[name][request], time)

    @property
    def attempts(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of the attempts that failures cut short, in the order in which they ended."""
        kinds = REQUEST_COLUMNS | {name: _KINDS[name] for name in self._names}
        return {name: np.array([row[name] for row in self.cut_short], kind) for name, kind in kinds.items()}
