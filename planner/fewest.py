"""The search for the fewest replicas that pass a given test."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Fewest:
    """Without a guess, steps grow by `stride` until one size is too small and one enough; then the range is halved."""

    limit: int  # replicas
    trial: int = 1  # to try next
    stride: float = 1.0
    low: int = 0  # most replicas that are too few, or not surely enough
    high: int | None = None  # fewest that are enough
    step: float = 1.0

    @property
    def replicas(self) -> int | None:
        """The answer; None if unknown, or above `limit`."""
        return self.high if self.high is not None and self.high - self.low == 1 else None

    @property
    def open(self) -> bool:
        """Whether sizes are left to try."""
        return self.replicas is None and self.low < self.limit

    def decide(self, enough: bool, guess: int | None = None) -> None:
        """Record whether `trial` is enough, and choose the next size; guess: of the answer."""
        if enough:
            self.high = self.trial
        else:
            self.low = self.trial
        if not self.open:
            return
        if guess is not None or self.high is None:
            highest = self.limit if self.high is None else self.high - 1
            self.trial = min(max(guess or 0, self.low + int(self.step)), highest)
        elif self.low == 0:
            self.trial = max(1, self.high - int(self.step))
        else:
            self.trial = (self.low + self.high) // 2
        self.step *= self.stride
