"""A run's moves: when and where requests were prefilled and sent."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.journal import MOVE_COLUMNS, SENT_COLUMNS, RequestTable

OF_PREFILL = {"prefill_replica": "replica", "prefill_scheduled": "scheduled", "prefill_finish": "finish"}
_KINDS = MOVE_COLUMNS | SENT_COLUMNS
_ZERO_AT_FIRST = ("prefill_tokens", "pages_reserved", "pages_kept", "arrived", "sent", "reserved_in_step")


class Moves:
    """Fills MOVE_COLUMNS, and holds the prefill pools' table, where each prefill is a request.

    shares: a decoding pool has a prefix cache (SENT_COLUMNS).
    """

    def __init__(self, requests: RequestTable, shares: bool = False) -> None:
        num = len(requests.rows)
        self.table = RequestTable(num)
        self._names = (*MOVE_COLUMNS, *(SENT_COLUMNS if shares else ()))
        self._filled = {
            name: np.full(num, _first_value(name), _KINDS[name]) for name in self._names if name not in OF_PREFILL
        }
        self._turns = 0

    def note(self, request: int, **values: Any) -> None:
        for name, value in values.items():
            self._filled[name][request] = value

    def note_reserved(self, request: int, in_step: bool) -> None:
        """Set when a prefix cache's pages were reserved, in order of changes."""
        if "reserved_turn" in self._filled:
            self.note(request, reserved_turn=self.next_turn(), reserved_in_step=in_step)

    def next_turn(self) -> int:
        """Turn of a request handed to a replica now."""
        self._turns += 1
        return self._turns - 1

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Current MOVE_COLUMNS."""
        return {
            name: self.table[OF_PREFILL[name]] if name in OF_PREFILL else self._filled[name] for name in self._names
        }


def _first_value(name: str) -> float:
    unknown = np.nan if _KINDS[name] == "float64" else -1
    return 0 if name in _ZERO_AT_FIRST else unknown
