"""A GPU's state while its steps run: clock, power, temperature, throttling, processes.

Sampled through NVML of NVIDIA's driver; quantities that it does not give are left out.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from typing import Any

INTERVAL = 0.1  # s between samples; a query takes tens of microseconds

QUANTITIES = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "C"}
POWER_CAP = "power cap"  # normal for large matrix products
SELDOM = 0.05  # tolerated share of samples with a slower clock
# Bits of nvmlClocksEventReasons that mean a slower clock.
SLOWED = {
    0x4: POWER_CAP, 0x8: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit",
    0x80: "power brake",
}  # fmt: skip

# A sample: QUANTITIES, "reasons" (bits), "processes", as far as known.
Ask = Callable[[], Mapping[str, float]]


class Clocks:
    """Samples of a device's state, at most one per INTERVAL."""

    def __init__(self, ask: Ask | None, now: Callable[[], float] = time.monotonic) -> None:
        """ask: None on a CPU."""
        self._ask, self._now = ask, now
        self._next = -float("inf")
        self.samples: list[Mapping[str, float]] = []

    def sample(self) -> None:
        """Take a sample unless the last is younger than INTERVAL."""
        if self._ask is None or self._now() < self._next:
            return
        self._next = self._now() + INTERVAL
        try:
            found = self._ask()
        except Exception:  # a driver error must not end a run
            self._ask = None
            return
        if found:
            self.samples.append(found)

    def found(self, first: int = 0) -> dict[str, list[float]]:
        """Least, median and most of each quantity from sample `first` on."""
        each = {name: [float(s[name]) for s in self.samples[first:] if name in s] for name in QUANTITIES}
        return {name: [min(seen), median(seen), max(seen)] for name, seen in each.items() if seen}

    def slowed(self, first: int = 0) -> dict[str, float]:
        """By reason, the share of samples from `first` on that it slowed."""
        asked = [int(s["reasons"]) for s in self.samples[first:] if "reasons" in s]
        shares = {name: sum(bool(bits & bit) for bits in asked) for bit, name in SLOWED.items()}
        return {name: count / len(asked) for name, count in shares.items() if count}

    def processes(self, first: int = 0) -> int | None:
        """Most processes that computed at once, this one included; None: unknown."""
        return int(max((s.get("processes", 0) for s in self.samples[first:]), default=0)) or None

    def state(self, first: int = 0) -> dict[str, Any]:
        """All of the above, for files."""
        found: dict[str, Any] = dict(self.found(first))
        if found:
            found |= {"slowed": self.slowed(first), "processes": self.processes(first)}
        return found

    def words(self, first: int = 0) -> str:
        """The quantities in one line; "" without samples."""
        words = [
            f"{middle:.0f} {QUANTITIES[name]} ({least:.0f} to {most:.0f})"
            for name, (least, middle, most) in self.found(first).items()
        ]
        words += [f"slowed by {name} in {share:.0%}" for name, share in self.slowed(first).items()]
        if (self.processes(first) or 0) > 1:
            words.append(f"up to {self.processes(first)} processes")
        return ", ".join(words)

    def __str__(self) -> str:
        """The state as a profile stores it."""
        return self.words()

    def doubts(self) -> list[str]:
        """Reasons why the device may not have run at its own speed, a line each."""
        found = [
            f"clocks: slowed by {name} in {share:.0%} of the samples, expected at most {SELDOM:.0%}"
            for name, share in self.slowed().items()
            if name != POWER_CAP and share > SELDOM
        ]
        if (self.processes() or 0) > 1:
            found.append(f"clocks: {self.processes()} processes computed on the device, expected this one alone")
        return found


class Blocks:
    """The device's state during each block of samples, as lines of text."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._first = len(clocks.samples)
        self.lines: list[str] = []

    def end(self, what: str) -> None:
        """End a block of samples."""
        state = self._clocks.words(self._first)
        self._first = len(self._clocks.samples)
        if state:
            self.lines.append(f"{what}: {state}")


def clocks_of(uuid: str | None) -> Clocks:
    """The clocks of the GPU with this UUID, which also names hidden devices; None: a CPU."""
    return Clocks(None) if uuid is None else clocks_by(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))


def clocks_by(handle_of: Callable[[Any], Any]) -> Clocks:
    """The clocks of the GPU that NVML gives this handle."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = handle_of(nvml)
    except Exception:  # no driver, or no package
        return Clocks(None)

    def ask() -> dict[str, float]:
        answers: dict[str, float] = {}
        for name, question in questions.items():
            with suppress(nvml.NVMLError):
                answers[name] = question()
        return answers

    questions: dict[str, Callable[[], float]] = {
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
    return Clocks(ask)
