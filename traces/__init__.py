"""Workload traces: files of many tools, or drawn arrivals."""

from .arrivals import ARRIVALS as ARRIVALS
from .canonical import write as write
from .lengths import LENGTHS as LENGTHS
from .load import load as load
from .shipped import SHIPPED as SHIPPED
from .stats import describe as describe
from .synth import prepare as prepare
from .synth import synth as synth
from .trace import Trace as Trace
from .trace import TraceNotes as TraceNotes
