"""`dsim metrics`: every metric's unit and formula."""

from dataclasses import asdict

from . import options
from .screen import print_json


def metrics_command(
    json: options.AsJson = False,
) -> None:
    """Print the meaning of every number in a report.

    dsim metrics
    dsim metrics --json
    """
    from ..results.metrics import METRICS

    if json:
        print_json({name: asdict(metric) for name, metric in METRICS.items()}, indent=2)
        return
    for name, metric in METRICS.items():
        unit, note = (f" [{metric.unit}]" if metric.unit else ""), (f" ({metric.note})" if metric.note else "")
        print(f"{name}{unit}: {metric.formula}{note}")
