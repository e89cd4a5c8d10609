"""Stabilisation windows: a target falls only after a time without a contrary wish."""

import math
from collections import deque


class Wishes:
    """The wishes of the last seconds.

    down: s that a lower wish must last. from_first: the pool's number at the first wish counts as an
    earlier one.
    """

    def __init__(self, down: float, from_first: bool = False) -> None:
        self._down, self._from_first = down, from_first
        self._wishes: deque[tuple[float, int]] = deque()

    def settle(self, now: float, wish: int, has: int) -> int:
        """The target for a pool that has, or starts, `has` replicas."""
        wishes = self._wishes
        if self._from_first and not wishes:
            wishes.append((math.nextafter(now, -math.inf), has))
        wishes.append((now, wish))
        while wishes[0][0] < now - self._down:
            wishes.popleft()
        if wish < has:
            return min(has, max(count for _, count in wishes))
        return max(has, min(count for time, count in wishes if time == now))
