"""The clock and the power of a GPU, sampled while its steps run.

The management library comes with NVIDIA's driver. What it refuses is left out: no measurement depends on it.
"""

import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any

INTERVAL = 0.1  # s between two samples at the least: an answer takes the driver tens of microseconds
LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM

Ask = Callable[[], tuple[int | None, int | None]]  # MHz and mW at this moment


class Clocks:
    """Samples of a device's clock (MHz) and power (W), one at each `sample`, at most one an INTERVAL."""

    def __init__(self, ask: Ask | None, now: Callable[[], float] = time.monotonic) -> None:
        """ask: returns both; None on a CPU."""
        self._ask, self._now = ask, now
        self._next = -float("inf")
        self.mhz: list[int] = []
        self.watts: list[float] = []

    def sample(self) -> None:
        """Ask the device, unless it was asked a moment ago."""
        if self._ask is None or self._now() < self._next:
            return
        self._next = self._now() + INTERVAL
        try:
            mhz, milliwatts = self._ask()
        except Exception:  # whatever the driver says must end no run
            self._ask = None
            return
        if mhz is not None:
            self.mhz.append(mhz)
        if milliwatts is not None:
            self.watts.append(milliwatts / 1e3)

    def found(self) -> dict[str, list[float]]:
        """Least, median and most of each quantity that was sampled."""
        each: dict[str, list[float]] = {"clock_mhz": [float(n) for n in self.mhz], "power_w": self.watts}
        return {name: [min(seen), median(seen), max(seen)] for name, seen in each.items() if seen}

    def __str__(self) -> str:
        """The line of a profile."""
        units = {"clock_mhz": "MHz", "power_w": "W"}
        return ", ".join(
            f"{middle:.0f} {units[name]} ({least:.0f} to {most:.0f})"
            for name, (least, middle, most) in self.found().items()
        )


def clocks_of(uuid: str | None, load: Callable[[str], Any] = ctypes.CDLL) -> Clocks:
    """The clocks of a GPU by its UUID, which also names devices hidden from this process; None: no GPU."""
    if uuid is None:
        return Clocks(None)
    try:
        library = load(LIBRARY)
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return Clocks(None)
    except Exception:  # no library, or one without these functions
        return Clocks(None)

    def ask() -> tuple[int | None, int | None]:
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        clock_refused = library.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(mhz))
        power_refused = library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        return None if clock_refused else mhz.value, None if power_refused else milliwatts.value

    return Clocks(ask)
