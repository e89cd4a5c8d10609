"""Decisions from the twin: how much a fleet sustains, which settings are best, and how sure that is."""

from .capacity import Capacity, capacity, fewest_replicas
from .scenario import Scenario
from .sweep import Sweep, sweep
from .tune import tune
from .tuned import Tuned

__all__ = ["Capacity", "Scenario", "Sweep", "Tuned", "capacity", "fewest_replicas", "sweep", "tune"]
