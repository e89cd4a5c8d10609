"""Choose the experts' grouped product: ours, or PyTorch's where it is faster.

Both are timed when the model is opened, on the first layer with experts, evenly drawn; a run's settings record times
and choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.grouped_experts import grouped_experts, library
from .attention import Record, Time, device_seconds
from .canvas_model import CanvasModel
from .experts import MixedFeedForward
from .model import Decoder

ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # numbers of rows timed
# Relative to the largest number: products round to bf16 once or twice between.
NEAR = 2**-6


class Matrices(NamedTuple):
    gate_up: Tensor
    down: Tensor
    top_k: int
    activation: str = "silu"


@dataclass(frozen=True)
class Timed:
    """A layer's experts (s)."""

    rows: int
    ours: float
    grouped_mm: float


@dataclass
class ExpertProduct:
    """Where PyTorch's grouped product was faster."""

    timed: list[Timed] = field(default_factory=list)  # by rows, ascending
    refused: str | None = None  # why ours is always used

    def takes(self, rows: int) -> bool:
        """Whether PyTorch was faster at the next larger timed number, or the largest."""
        if self.refused is not None or not self.timed:
            return False
        found = next((t for t in self.timed if t.rows >= rows), self.timed[-1])
        return found.grouped_mm < found.ours

    @property
    def settings(self) -> dict[str, Any]:
        if self.refused is not None:
            return {"refused": self.refused}
        steps = [
            {"rows": t.rows, "ours_us": round(1e6 * t.ours, 1), "grouped_mm_us": round(1e6 * t.grouped_mm, 1)}
            for t in self.timed
        ]
        return {"grouped_mm_at": [t.rows for t in self.timed if self.takes(t.rows)], "steps": steps}


def product_of(model: Decoder, record: Record | None = None) -> ExpertProduct | None:
    """Time both on a CUDA device and set the layers' choice; None without experts."""
    layers = [x for x in model.modules() if isinstance(x, MixedFeedForward)]
    if not layers:
        return None
    first = layers[0]
    found = choose(Matrices(first.gate_up, first.down, first.about.top_k), device_seconds, record)
    for layer in layers:
        layer.product = found
    torch.cuda.empty_cache()
    return found


def product_of_canvases(model: CanvasModel, record: Record | None = None) -> ExpertProduct:
    """The same for canvases."""
    experts = Matrices(*model.experts(), model.config.top_k, "gelu")
    model.product = found = choose(experts, device_seconds, record)
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def choose(experts: Matrices, time_of: Time, record: Record | None = None) -> ExpertProduct:
    """Time both. record: captures launches, as steps will; None: steps are eager."""
    if library.at_hand() is None:
        return ExpertProduct(refused=f"PyTorch {torch.__version__} has no grouped product")
    if experts.gate_up.dtype not in library.DTYPES:
        return ExpertProduct(refused=f"experts in {experts.gate_up.dtype}, expected bf16")
    graphs: list[object] = []  # kept: later, smaller graphs reuse their memory
    try:
        timed = [_time(experts, rows, time_of, record, graphs) for rows in reversed(ROWS)]
    except Exception as error:  # any error of PyTorch's: use ours
        return ExpertProduct(refused=(str(error) or type(error).__name__).splitlines()[0])
    return ExpertProduct(timed[::-1])


def _time(
    experts: Matrices, rows: int, time_of: Time, record: Record | None, graphs: list[object]
) -> Timed:  # fmt: skip
    gate_up, down, top_k, activation = experts
    chance = torch.Generator(gate_up.device).manual_seed(rows)
    x = torch.randn(rows, gate_up.shape[2], generator=chance, device=gate_up.device).to(gate_up.dtype)
    scores = torch.rand(rows, len(gate_up), generator=chance, device=gate_up.device)
    weights, chosen = scores.topk(top_k, dim=-1)

    def launch(grouped_mm: bool) -> Callable[[], tuple[Tensor]]:
        return lambda: (grouped_experts(x, chosen, weights, gate_up, down, activation, grouped_mm=grouped_mm),)

    ours, theirs = launch(False), launch(True)
    expected, read = ours()[0].float(), theirs()[0].float()
    far, most = float((read - expected).abs().max()), float(expected.abs().max())
    if not far <= NEAR * most:
        raise ValueError(
            f"PyTorch's grouped product differs by {far:.3g} of values up to {most:.3g}, expected at most "
            f"{NEAR * most:.3g}"
        )
    launches: list[Callable[[], object]] = [ours, theirs]
    if record is not None:
        launches = [record(each)[0] for each in (ours, theirs)]
        graphs += launches
    return Timed(rows, *(time_of(each) for each in launches))
