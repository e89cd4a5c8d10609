"""How far policies' answers agree with an exact run's, as scores for `dsim tune --quality-table`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.policy import Policy, name_of, settings_of
from ..files.write import csv_of
from ..planner.quality import reference_of
from ..planner.space import spelt

NO = ("", "none")  # no value


@dataclass(frozen=True)
class Agreed:
    """A policy's answers against the exact run of the same weights."""

    policy: str  # as given
    exact: str  # the exact run's policy
    equal: float  # share of equal tokens
    change: float  # nats a token; below 0: less likely
    num_requests: int
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.policy}: {100 * self.equal:.1f} % of {self.num_tokens:,} tokens as {self.exact}'s, "
            f"{self.change:+.3f} nats a token"
        )


def exact_of(policy: Policy, block_length: int) -> str:
    """Quality 1 by definition: full cache; whole blocks, sequence or canvases each step."""
    if not policy.granularity.on_a_grid:  # in the checkpoint's steps
        return f"sglang-gemma,canvas_length={block_length}"
    exact = reference_of(policy.family).name
    return exact if policy.family == "full-sequence" else f"{exact}:{block_length}"


def table(found: Sequence[tuple[Agreed, Policy]], model: str, benchmark: str) -> str:
    """CSV, one row per policy: scores, and fields that may change tokens."""
    fields = {
        agreed.policy: {name: spelt(value) for name, value in settings_of(policy).items() if name not in policy.neutral}
        for agreed, policy in found
    }
    columns = list(dict.fromkeys(name for own in fields.values() for name, value in own.items() if value not in NO))
    rows = [["policy", *columns, "model", "benchmark", "score", "baseline", "source"]]
    for agreed, _ in found:
        own = fields[agreed.policy]
        preset = name_of(agreed.policy)
        source = (
            f"dsim live --agreement: share of {agreed.num_tokens} tokens of {agreed.num_requests} requests that are "
            f"{agreed.exact}'s; {agreed.change:+.4f} nats a token"
        )
        cells = [own.get(name, "") for name in columns]
        rows.append([preset, *cells, model, benchmark, f"{agreed.equal:.6f}", "1", source])
    return csv_of(rows)
