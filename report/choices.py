"""What a run's policies chose: thresholds of steps, and the order of the queue."""

import numpy as np

from ..results.run import Run
from .page import Table, table
from .table import number

STEPS = ("policy", "threshold", "steps", "share (%)", "committed", "waiting")
REQUESTS = ("policy", "requests that passed earlier ones", "share (%)", "most passed")


def of_choices(run: Run) -> list[Table]:
    """Decode steps by threshold, with means; requests first scheduled before earlier ones of their replica."""
    steps, requests, held = [], [], run.more_columns
    for policy in run.policies:
        if "threshold" in held:
            columns = run.steps(policy, ["threshold", "committed", "waiting"])
            values, at = np.unique(columns["threshold"], return_inverse=True)
            num = np.bincount(at)
            sums = (np.bincount(at, columns[name]).tolist() for name in ("committed", "waiting"))
            chose = int(num[~np.isnan(values)].sum())
            steps += [
                (policy, f"{value:g}", f"{n:,}", number(100 * n / chose), *(number(total / n) for total in totals))
                for value, n, *totals in zip(values.tolist(), num.tolist(), *sums, strict=True) if not np.isnan(value)
            ]  # fmt: skip
        if "passed" in held:
            passed = run.requests(policy, ["passed"])["passed"]
            n = int(np.count_nonzero(passed))
            requests.append((policy, f"{n:,}", number(100 * n / max(1, len(passed))), f"{passed.max(initial=0):,}"))
    return [table(head, rows) for head, rows in ((STEPS, steps), (REQUESTS, requests)) if rows]
