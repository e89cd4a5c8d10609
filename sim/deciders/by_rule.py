"""A decider's rule, asked once a request."""

from typing import Any

import numpy as np

from ...engine.fleet_rules import RequestFigures, decision, splits
from ...engine.jit import fields_reached
from ...engine.records import dtype_of, table
from ...engine.two_levels import TwoLevels, settings_of
from ..routers.router import RequestView
from ..seats import Seats
from . import Deciding


class ByRule:
    """Asks a decider's rule `decision` in place of `Decider.splits`; num_requests: as of TwoLevels."""

    def __init__(self, deciding: Deciding, num_requests: int) -> None:
        answer = type(deciding.decider).decision
        self._rule = TwoLevels(splits, decision, answer, f"decider {deciding.spec}", num_requests)
        self._reads = fields_reached(answer)
        self._settings = settings_of(deciding.decider)
        self._request = table(np.zeros(1, dtype_of(RequestFigures)))

    def splits(self, request: RequestView, prefill: Seats, decode: Seats) -> bool:
        """As Decider.splits; PolicyError if the rule cannot be compiled."""
        for seats in (prefill, decode):
            seats.note_deferred()
            if "queued_prompt_tokens" in self._reads:
                seats.records["queued_prompt_tokens"] = [seat.queued_prompt_tokens for seat in seats]
        if "found" in self._reads:
            decode.records["found"] = [seat.found(request) for seat in decode]
        self._request[0] = (
            request.index, request.arrival, request.input_length, request.expected, request.priority, request.deadline,
        )  # fmt: skip
        board: Any = decode.board
        return bool(
            self._rule(
                self._request, prefill.records, decode.records, prefill.places, decode.places, board.counters,
                board.coming, self._settings,
            )
        )  # fmt: skip
