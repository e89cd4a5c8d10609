"""A link carries KV from a prefill pool to a decoding pool."""

import heapq
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from typing import Self

from ..engine.errors import PolicyError, quoted
from ..profiler.profile import Profile
from .by_name import values
from .clock import Clock

_BANDWIDTH = {"TB/s": "1e12", "GB/s": "1e9", "MB/s": "1e6", "Gb/s": "125e6"}  # bytes/s
_LATENCY = {"us": "1e-6", "ms": "1e-3", "s": "1"}
_TYPES = {"from": str, "to": str, "overlap": bool}
_EXAMPLE = "450GB/s,10us"


@dataclass(frozen=True)
class Link:
    """A link from a prefilling pool to a decoding one."""

    bandwidth: float  # bytes/s; infinity: latency only
    latency: float = 0.0  # s before the first byte
    source: str = ""  # pool; empty: the first
    to: str = ""  # ... the second of two
    overlap: bool = False  # layers travel while later ones are computed

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise PolicyError(f"link bandwidth is {self.bandwidth:g} bytes/s, expected above 0")
        if not 0 <= self.latency < math.inf:
            raise PolicyError(f"link latency is {self.latency:g} s, expected at least 0 and finite")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `BANDWIDTH[,LATENCY][,field=value...]`, or raise PolicyError."""
        asker = f"link {quoted(text)}"
        first, *items = text.split(",")
        bandwidth = _quantity(first, _BANDWIDTH, asker, "a bandwidth")
        latency = 0.0
        if items and "=" not in items[0]:
            latency = _quantity(items.pop(0), _LATENCY, asker, "a latency")
        settings = values(items, _TYPES, asker)
        return cls(bandwidth, latency, settings.pop("from", ""), **settings)

    def size(self, profile: Profile, tokens: int) -> int:
        """Bytes of a sequence's KV; layers with a window keep its last tokens."""
        memory, windowed = profile.memory, profile.model.windowed
        in_window = tokens
        if windowed is not None:
            in_window = min(tokens, windowed.window - 1)
        return tokens * memory.kv_bytes_per_token + in_window * memory.window_bytes_per_token

    def unsent(self, profile: Profile, size: float, prefill: float) -> float:
        """Bytes to send after a prefill of `prefill` seconds.

        With `overlap` each layer is sent while the next are computed; the last follows the prefill.
        """
        if not self.overlap:
            return size
        return max(size / profile.model.layers, size - self.bandwidth * prefill)


class Wire:
    """A replica's end of a link during a run: its transfers share the bandwidth equally (processor sharing)."""

    def __init__(self, env: Clock, link: Link) -> None:
        self._env, self._link = env, link
        self._served = 0.0  # bytes sent to each transfer in flight since the wire was last idle
        self._since = 0.0  # s, of `_served`
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # a heap by `_served` at each end
        self._order, self._version = count(), 0

    def send(self, size: float, then: Callable[[], None]) -> None:
        """Send bytes from now on; `then` is called on arrival."""
        link, env = self._link, self._env
        if link.bandwidth == math.inf:
            env.call(env.now + link.latency, then)
        elif link.latency:
            env.call(env.now + link.latency, lambda: self._begin(size, then))
        else:
            self._begin(size, then)

    def _begin(self, size: float, then: Callable[[], None]) -> None:
        self._progress()
        heapq.heappush(self._ends, (self._served + size, next(self._order), then))
        self._expect()

    def _progress(self) -> None:
        """Count bytes sent up to now."""
        if self._ends:
            self._served += (self._env.now - self._since) * self._link.bandwidth / len(self._ends)
        else:
            self._served = 0.0
        self._since = self._env.now

    def _expect(self) -> None:
        """Schedule the next transfer's end; any begin or end reschedules it."""
        self._version += 1
        if self._ends:
            remaining = max(0.0, self._ends[0][0] - self._served)
            version = self._version
            self._env.call(
                self._env.now + remaining * len(self._ends) / self._link.bandwidth, lambda: self._end(version)
            )

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._served, self._since = self._ends[0][0], self._env.now
        over = []
        while self._ends and self._ends[0][0] <= self._served:
            over.append(heapq.heappop(self._ends)[2])
        self._expect()
        for then in over:
            then()


def _quantity(text: str, units: dict[str, str], asker: str, noun: str) -> float:
    """A number with a unit; infinity for `inf`."""
    if text == "inf" and "GB/s" in units:
        return math.inf
    shape = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(\D+)", text)
    if shape is None or shape[2] not in units:
        raise PolicyError(f"{asker}: {quoted(text)} is not {noun} in {', '.join(units)}, such as {_EXAMPLE}")
    return float(Decimal(shape[1]) * Decimal(units[shape[2]]))  # 10us is 1e-5 s exactly
