"""Quantities that vLLM 0.33, SGLang 0.5.23 and LMDeploy 0.18 publish, and their names: a table to write and to read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..engine.errors import DsimError
from ..files.read import read_csv

RELEASES = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23", "lmdeploy": "LMDeploy 0.18.0"}
RANK_LABELS = {"vllm": "engine", "sglang": "dp_rank", "lmdeploy": "engine"}  # of a replica
CACHE_SETTINGS = "vllm:cache_config_info"  # a metric with settings as labels
# Of a page without a GPU (docs/serve-metrics.md).
SIMULATED = "dsim_simulated"
SIMULATED_TIME, SIMULATED_START = f"{SIMULATED}_time_seconds", f"{SIMULATED}_start_seconds"
WITH_HANDLES = "lmdeploy"  # a request waits for one of max_batch handles, and its latencies begin with it


@dataclass(frozen=True)
class Quantity:
    """A metric, and its name in each engine without the prefix; empty: the engine lacks it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    vllm: str = ""
    sglang: str = ""
    lmdeploy: str = ""
    diffusion: bool = False  # only of policies that commit masks

    def name_in(self, engine: str) -> str:
        """The name on an engine's page, with its prefix; empty if the engine lacks it."""
        name = {"vllm": self.vllm, "sglang": self.sglang, "lmdeploy": self.lmdeploy}[engine]
        return name and f"{engine}:{name}"


_ROWS: list[dict[str, Any]] = [row for _, row in read_csv(Path(__file__).with_suffix(".csv"), ("name", "about"))]
QUANTITIES = tuple(Quantity(**row | {"diffusion": bool(row["diffusion"])}) for row in _ROWS)
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}

# Upper edges of histograms' buckets, by engine and quantity.
EDGES: dict[str, dict[str, tuple[float, ...]]] = {engine: {} for engine in RELEASES}
for _, _row in read_csv(Path(__file__).with_name("histogram_edges.csv"), ("engine", "quantity", "edges")):
    EDGES[_row["engine"]][_row["quantity"]] = tuple(map(float, _row["edges"].split()))


def edges_of(engine: str, quantity: str, context_limit: int) -> tuple[float, ...]:
    """Upper edges of a histogram's buckets; of lengths mostly 1, 2, 5, 10 ... up to the context limit."""
    if quantity in EDGES[engine]:
        return EDGES[engine][quantity]
    steps = (m * 10**e for e in range(len(str(context_limit))) for m in (1, 2, 5))
    return tuple(float(n) for n in steps if n <= context_limit)


def engine_of(policy: str, metrics_as: str | None = None) -> str:
    """The engine of --metrics-as, or the one in the policy's name; vLLM for other policies."""
    if metrics_as is not None and metrics_as not in RELEASES:
        raise DsimError(f"--metrics-as is {metrics_as}, expected one of {', '.join(RELEASES)}")
    return metrics_as or next((engine for engine in RELEASES if policy.startswith(engine)), "vllm")
