"""The memory of a replica at its largest forward, as a part of a run's page: who holds it, and who lacks it."""

from collections.abc import Sequence

from ..results.manifest import MemoryInfo
from .page import Row, Section, Table
from .table import number

CAPTION = (
    "GB of the largest forward that a policy's limits allow, beside what stands from the first step to the last. "
    "What a forward holds is counted for one executor (docs/profiles.md); another one fuses more or less."
)


def shortages(found: Sequence[MemoryInfo]) -> list[str]:
    """A line for each policy that may run out of memory."""
    return [f"OUT OF MEMORY {m.get('policy', '')}: it may be {m['shortage']}" for m in found if m.get("shortage")]


def of_memory(found: Sequence[MemoryInfo]) -> Section:
    """A table of who holds what."""
    rows = []
    for told in found:
        policy = told.get("policy", "")
        size = f"{told.get('tokens', 0):,} tokens, {told.get('head_rows', 0):,} rows of logits"
        rows += [Row((policy, name, number(gb), size), group=policy) for name, gb in told.get("gb", {}).items()]
        rows.append(Row((policy, "of", number(told.get("capacity_gb")), ""), group=policy))
    head = ("policy", "tensor", "GB", "forward")
    return Section("Memory", (Table(head, tuple(rows), caption=CAPTION, left=frozenset({0, 1, 3})),) if rows else ())
