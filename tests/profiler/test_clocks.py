"""A device's clock and power are sampled while its steps run, by NVML, and cost no measurement."""

import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest

from dsim.profiler.clocks import INTERVAL, Clocks, clocks_of

ANSWERS: dict[str, Any] = {
    "Init": None, "DeviceGetHandleByUUID": 1, "DeviceGetClockInfo": 1755, "DeviceGetPowerUsage": 612_300,
    "DeviceGetTemperature": 61, "DeviceGetCurrentClocksThrottleReasons": 5, "DeviceGetComputeRunningProcesses": [0, 1],
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Mock]:
    """The functions of a driver with one device."""
    functions = {f"nvml{name}": Mock(return_value=answer) for name, answer in ANSWERS.items()}
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    return functions


def test_the_driver_is_asked_for_the_device_of_this_process(driver: Mapping[str, Mock]) -> None:
    clocks = clocks_of("a-b")
    clocks.sample()
    driver["nvmlDeviceGetHandleByUUID"].assert_called_with("GPU-a-b")
    driver["nvmlDeviceGetClockInfo"].assert_called_with(1, pynvml.NVML_CLOCK_SM)
    assert clocks.quantities() == {"clock_mhz": [1755] * 3, "power_w": [612.3] * 3, "temperature_c": [61] * 3}
    assert str(clocks) == (
        "1755 MHz (1755 to 1755), 612 W (612 to 612), 61 C (61 to 61), slowed by power cap in 100%, up to 2 processes"
    )


@pytest.mark.parametrize(("refused", "num"), [("Init", 0), ("DeviceGetHandleByUUID", 0), ("DeviceGetPowerUsage", 4)])
def test_what_the_driver_refuses_is_left_unsaid(driver: Mapping[str, Mock], refused: str, num: int) -> None:
    driver[f"nvml{refused}"].side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    clocks = clocks_of("a-b")
    clocks.sample()
    assert sum(map(len, clocks.samples)) == num


def test_without_a_gpu_or_the_package_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for clocks in (clocks_of(None), clocks_of("a-b")):
        clocks.sample()
        assert clocks.samples == []


def test_samples_are_an_interval_apart_and_a_driver_that_fails_is_asked_no_more() -> None:
    times = iter([0.0, 0.0, INTERVAL / 2, INTERVAL, INTERVAL, 3 * INTERVAL, 3 * INTERVAL])
    first, second = {"clock_mhz": 1980, "power_w": 300.0}, {"clock_mhz": 1410, "power_w": 700.0, "reasons": 0x4}
    answers = iter([first, second])  # and then an exception
    clocks = Clocks(lambda: next(answers), now=lambda: next(times))
    for _ in range(5):
        clocks.sample()
    assert clocks.samples == [first, second]
    assert clocks.quantities()["clock_mhz"] == [1410, 1695.0, 1980]
    assert clocks.slowed() == {"power cap": 1.0}


def test_a_device_that_was_slowed_or_shared_is_doubted() -> None:
    answers = iter([
        {"clock_mhz": 1980, "reasons": 0x4, "processes": 1}, {"clock_mhz": 1200, "reasons": 0x40, "processes": 2},
    ])  # fmt: skip
    clocks = Clocks(lambda: next(answers), now=iter(range(9)).__next__)
    clocks.sample()
    assert clocks.doubts() == []  # a power cap is how a healthy device computes large products
    clocks.sample()
    assert clocks.doubts() == [
        "clocks: slowed by hardware thermal limit in 50% of the samples, expected at most 5%",
        "clocks: 2 processes computed on the device, expected this one alone",
    ]
