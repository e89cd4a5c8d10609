"""A device's clock and power are sampled while its steps run, by its driver's library, and cost no measurement."""

import ctypes
from typing import Any

from dsim.profiler.clocks import INTERVAL, Blocks, Clocks, clocks_of


class Library:
    """A driver's library that knows one device, by its UUID."""

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.asked_for = b""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.refused.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:  # noqa: N802
        self.asked_for = name
        return self.refused.get("handle", 0)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, out: Any) -> int:  # noqa: N802
        assert kind == 1, "of the multiprocessors"
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = 1755
        return self.refused.get("clock", 0)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, out: Any) -> int:  # noqa: N802
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = 61
        return self.refused.get("temperature", 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, out: Any) -> int:  # noqa: N802
        ctypes.cast(out, ctypes.POINTER(ctypes.c_ulonglong))[0] = 0x4 | 0x1
        return self.refused.get("reasons", 0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: None) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return self.refused.get("processes", 7)  # no room to list them

    def nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:  # noqa: N802
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = 612_300
        return self.refused.get("power", 0)


def test_the_driver_is_asked_for_the_device_of_this_process() -> None:
    library = Library()
    clocks = clocks_of("a-b", lambda name: library)
    clocks.sample()
    assert library.asked_for == b"GPU-a-b"
    found = {"clock_mhz": [1755, 1755, 1755], "power_w": [612.3, 612.3, 612.3], "temperature_c": [61, 61, 61]}
    assert clocks.found() == found
    assert clocks.state() == {**found, "slowed": {"power cap": 1.0}, "processes": 2}
    assert str(clocks) == (
        "1755 MHz (1755 to 1755), 612 W (612 to 612), 61 C (61 to 61), slowed by power cap in 100%, up to 2 processes"
    )


def test_what_the_driver_refuses_is_left_unsaid() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    everything = {"clock": 3, "power": 3, "temperature": 3, "reasons": 3, "processes": 3}
    refusals: list[dict[str, int]] = [{"init": 9}, {"handle": 6}, everything]
    for clocks in (clocks_of("a-b", missing), *(clocks_of("a-b", lambda name, r=r: Library(**r)) for r in refusals)):
        clocks.sample()
        assert (clocks.found(), str(clocks)) == ({}, "")
    no_power = clocks_of("a-b", lambda name: Library(power=3, temperature=3))
    no_power.sample()
    assert list(no_power.found()) == ["clock_mhz"]
    assert clocks_of(None).found() == {}


def test_samples_are_an_interval_apart_and_a_driver_that_fails_is_asked_no_more() -> None:
    times = iter([0.0, 0.0, INTERVAL / 2, INTERVAL, INTERVAL, 3 * INTERVAL, 3 * INTERVAL])
    first, second = {"clock_mhz": 1980, "power_w": 300.0}, {"clock_mhz": 1410, "power_w": 700.0, "reasons": 0x4}
    answers = iter([first, second])  # and then an exception
    clocks = Clocks(lambda: next(answers), now=lambda: next(times))
    for _ in range(5):
        clocks.sample()
    assert clocks.samples == [first, second]
    assert clocks.found()["clock_mhz"] == [1410, 1695.0, 1980]
    assert (clocks.found(1)["power_w"], clocks.slowed()) == ([700.0, 700.0, 700.0], {"power cap": 1.0})


def test_each_block_of_samples_has_its_own_state_and_a_device_that_was_slowed_or_shared_is_doubted() -> None:
    answers = iter([
        {"clock_mhz": 1980, "reasons": 0x4, "processes": 1}, {"clock_mhz": 1200, "reasons": 0x40, "processes": 2},
    ])  # fmt: skip
    clocks = Clocks(lambda: next(answers), now=iter(range(9)).__next__)
    blocks = Blocks(clocks)
    blocks.end("before any sample")
    clocks.sample()
    blocks.end("first")
    assert clocks.doubts() == []  # a power cap is how a healthy device computes large products
    clocks.sample()
    blocks.end("second")
    assert blocks.lines == [
        "first: 1980 MHz (1980 to 1980), slowed by power cap in 100%",
        "second: 1200 MHz (1200 to 1200), slowed by hardware thermal limit in 100%, up to 2 processes",
    ]
    assert clocks.doubts() == [
        "clocks: slowed by hardware thermal limit in 50% of the samples, expected at most 5%",
        "clocks: 2 processes computed on the device, expected this one alone",
    ]
