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
            state = self._ask()
        except Exception:  # a driver error must not end a run
            self._ask = None
            return
        if state:
            self.samples.append(state)

    def quantities(self) -> dict[str, list[float]]:
        """Least, median and most of each quantity."""
        columns = {name: [float(s[name]) for s in self.samples if name in s] for name in QUANTITIES}
        return {name: [min(values), median(values), max(values)] for name, values in columns.items() if values}

    def slowed(self) -> dict[str, float]:
        """By reason, the share of samples that it slowed."""
        reasons = [int(s["reasons"]) for s in self.samples if "reasons" in s]
        shares = {name: sum(bool(bits & bit) for bits in reasons) for bit, name in SLOWED.items()}
        return {name: count / len(reasons) for name, count in shares.items() if count}

    @property
    def num_processes(self) -> int:
        """Most processes that computed at once, this one included; 0: unknown."""
        return int(max((s.get("processes", 0) for s in self.samples), default=0))

    def state(self, first: int) -> dict[str, Any]:
        """Quantities, shares slowed and processes from sample `first` on, for files; {} without samples."""
        tail = Clocks(None)
        tail.samples = self.samples[first:]
        quantities = tail.quantities()
        return {**quantities, "slowed": tail.slowed(), "processes": tail.num_processes} if quantities else {}

    def __str__(self) -> str:
        """The state as a profile stores it; "" without samples."""
        words = [
            f"{middle:.0f} {QUANTITIES[name]} ({least:.0f} to {greatest:.0f})"
            for name, (least, middle, greatest) in self.quantities().items()
        ]
        words += [f"slowed by {name} in {share:.0%}" for name, share in self.slowed().items()]
        if self.num_processes > 1:
            words.append(f"up to {self.num_processes} processes")
        return ", ".join(words)

    def doubts(self) -> list[str]:
        """Reasons why the device may not have run at its own speed, a line each."""
        lines = [
            f"clocks: slowed by {name} in {share:.0%} of the samples, expected at most {SELDOM:.0%}"
            for name, share in self.slowed().items()
            if name != POWER_CAP and share > SELDOM
        ]
        if self.num_processes > 1:
            lines.append(f"clocks: {self.num_processes} processes computed on the device, expected this one alone")
        return lines


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
