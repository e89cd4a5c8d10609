"""A replica's memory at its largest forward."""

from collections.abc import Sequence

from ..results.manifest import MemoryInfo
from .page import Row, Section, Table
from .table import number

CAPTION = (
    "GB of the largest forward that a policy's limits allow, and of permanent tensors. A forward's tensors are "
    "those of one executor (docs/profiles.md); another may need more or less."
)


def shortages(found: Sequence[MemoryInfo]) -> list[str]:
    """Policies that may run out."""
    return [f"OUT OF MEMORY {m.get('policy', '')}: it may be {m['shortage']}" for m in found if m.get("shortage")]


def of_memory(found: Sequence[MemoryInfo]) -> Section:
    """Tensors by policy."""
    rows = []
    for memory in found:
        policy = memory.get("policy", "")
        size = f"{memory.get('tokens', 0):,} tokens, {memory.get('head_rows', 0):,} rows of logits"
        rows += [Row((policy, name, number(gb), size), group=policy) for name, gb in memory.get("gb", {}).items()]
        rows.append(Row((policy, "of", number(memory.get("capacity_gb")), ""), group=policy))
    head = ("policy", "tensor", "GB", "forward")
    return Section("Memory", (Table(head, tuple(rows), caption=CAPTION, left=frozenset({0, 1, 3})),) if rows else ())
