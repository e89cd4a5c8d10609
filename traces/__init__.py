"""Workload traces: files of many tools, or drawn arrivals."""

from .arrivals import ARRIVALS
from .lengths import LENGTHS
from .load import load
from .shipped import shipped_names
from .stats import describe
from .synth import prepare, synth
from .trace import Trace, TraceNotes
from .write import write

__all__ = [
    "ARRIVALS",
    "LENGTHS",
    "Trace",
    "TraceNotes",
    "describe",
    "load",
    "prepare",
    "shipped_names",
    "synth",
    "write",
]
