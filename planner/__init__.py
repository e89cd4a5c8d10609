"""Decisions from the twin: how much a fleet sustains, which settings are best, and how sure that is."""

from .scenario import Scenario
from .sweep import Sweep, sweep
from .tune import Tuned, tune

__all__ = ["Scenario", "Sweep", "Tuned", "sweep", "tune"]
