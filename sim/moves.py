"""The moves of a run: when and where each request was prefilled and sent, as columns (journal.MOVE_COLUMNS)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.journal import MOVE_COLUMNS, RequestTable


class Moves:
    """Fills MOVE_COLUMNS, and holds the request table of the prefill pools, where each prefill is a request."""

    def __init__(self, num_requests: int) -> None:
        self.table = RequestTable(num_requests)
        self._filled = {
            name: np.full(num_requests, np.nan if kind == "float64" else -1, kind)
            for name, kind in MOVE_COLUMNS.items()
        }
        for name in ("prefill_tokens", "pages_reserved", "pages_kept", "arrived"):
            self._filled[name][:] = 0
        self._turns = 0

    def note(self, request: int, **values: Any) -> None:
        """Set columns of a request."""
        for name, value in values.items():
            self._filled[name][request] = value

    def next_turn(self) -> int:
        """The place of a request that is handed to a replica now, in the order of all of them."""
        self._turns += 1
        return self._turns - 1

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The current values of MOVE_COLUMNS."""
        of_prefill = {"prefill_replica": "replica", "prefill_scheduled": "scheduled", "prefill_finish": "finish"}
        return {
            name: self.table[of_prefill[name]] if name in of_prefill else self._filled[name] for name in MOVE_COLUMNS
        }
