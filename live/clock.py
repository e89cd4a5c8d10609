"""Device time from a launch to its end."""

import time

import torch


class DeviceClock:
    """Starts when created. Reads CUDA events, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._took = time.perf_counter()
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._begin.record()

    def stop(self) -> None:
        """Mark the end, after all launches so far."""
        if self._cuda:
            self._end.record()
        self._took = time.perf_counter() - self._took

    def seconds(self) -> float:
        """Waits for the device."""
        if self._cuda:
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 if self._cuda else self._took
