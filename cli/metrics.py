"""`dsim metrics`: every metric's unit and formula."""

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
        meanings = {
            name: {"unit": metric.unit, "formula": metric.formula, "note": metric.note}
            for name, metric in METRICS.items()
        }
        print_json(meanings, indent=2)
        return
    for name, metric in METRICS.items():
        unit, note = (f" [{metric.unit}]" if metric.unit else ""), (f" ({metric.note})" if metric.note else "")
        print(f"{name}{unit}: {metric.formula}{note}")
