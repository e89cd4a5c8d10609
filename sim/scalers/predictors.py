"""Predictors of the next interval's value from earlier ones; zeros before the first value do not count.

Kalman's filter and defaults are those of Dynamo's planner 1.6.1.
"""

import math
import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...engine.errors import PolicyError, quoted

LEAST_POINTS = 5  # with fewer, the last value is the answer


class Predictor(Protocol):
    def add(self, value: float) -> None: ...
    def next(self) -> float: ...


class Constant:
    """The last value."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """Add an interval's value; NaN counts as 0."""
        value = 0.0 if math.isnan(value) else value
        if value or self._values:
            self._values.append(value)
            self._added(value)

    def _added(self, value: float) -> None:
        pass

    def next(self) -> float:
        """At least 0."""
        if len(self._values) < LEAST_POINTS:
            return self._values[-1] if self._values else 0.0
        return max(0.0, self._predict())

    def _predict(self) -> float:
        return self._values[-1]


class Trend(Constant):
    """The least-squares line through the last ten values."""

    def _predict(self) -> float:
        last = self._values[-10:]
        slope, level = np.polyfit(np.arange(len(last)), last, 1)
        return float(level + slope * len(last))


class Kalman(Constant):
    """A local linear trend: the level grows by the trend; both wander."""

    Q = np.diag([1.0, 0.1])  # variances of level and trend an interval
    R = 10.0  # variance of a value
    F = np.array([[1.0, 1.0], [0.0, 1.0]])

    def __init__(self) -> None:
        super().__init__()
        self._state = np.zeros(2)
        self._variance = 1000.0 * np.eye(2)

    def _added(self, value: float) -> None:
        if len(self._values) == 1:
            self._state = np.array([value, 0.0])
            return
        state, variance = self.F @ self._state, self.F @ self._variance @ self.F.T + self.Q
        gain = variance[:, 0] / (variance[0, 0] + self.R)
        self._state = state + gain * (value - state[0])
        self._variance = variance - np.outer(gain, variance[0])

    def _predict(self) -> float:
        return float((self.F @ self._state)[0])


class Arima(Constant):
    """An ARIMA model of the order with least AIC, chosen once; needs statsmodels.

    An order without AR and MA terms is chosen anew for log(1 + value).
    """

    ORDERS = tuple((p, d, q) for d in (0, 1) for p in range(3) for q in range(3))
    KEPT = 500  # values

    def __init__(self) -> None:
        super().__init__()
        try:
            from statsmodels.tsa.arima.model import ARIMA
        except ImportError:
            raise PolicyError("predictor is arima, which needs statsmodels: expected the extra `forecast`") from None
        self._model = ARIMA
        self._order: tuple[int, int, int] | None = None
        self._log = False

    def _predict(self) -> float:
        values = np.array(self._values[-self.KEPT :])
        if (values == values[0]).all():
            return float(values[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._order is None:
                self._order = self._best(values)
                if self._order[0] == self._order[2] == 0:
                    self._log, self._order = True, self._best(np.log1p(values))
            forecast = float(
                self._model(np.log1p(values) if self._log else values, order=self._order).fit().forecast()[0]
            )
        return math.expm1(forecast) if self._log else forecast

    def _best(self, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[int, int, int]:
        return min(self.ORDERS, key=lambda order: self._model(values, order=order).fit().aic)


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "constant": Constant, "trend": Trend, "kalman": Kalman, "arima": Arima,
}  # fmt: skip


def predictor(name: str) -> Predictor:
    if name not in PREDICTORS:
        raise PolicyError(f"predictor is {quoted(name)}, expected one of {', '.join(PREDICTORS)}")
    return PREDICTORS[name]()
