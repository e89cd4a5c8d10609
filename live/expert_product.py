"""Which grouped product a model's experts take on a device: our kernel's, or PyTorch's where that is faster.

Both are timed once, when the model is opened, on the first layer with experts and rows whose experts are drawn evenly.
A step takes the one that was faster at its number of rows. Times and choice are in the settings of every run and
profile.
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

ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of the steps that are timed
# Of the largest number: what lies between the products is rounded once or twice to bf16.
NEAR = 2**-6


class Matrices(NamedTuple):
    """A layer's experts."""

    gate_up: Tensor
    down: Tensor
    top_k: int
    activation: str = "silu"


@dataclass(frozen=True)
class Timed:
    """The experts of a layer, in s."""

    rows: int
    ours: float
    grouped_mm: float


@dataclass
class ExpertProduct:
    """Where PyTorch's grouped product was faster."""

    timed: list[Timed] = field(default_factory=list)  # by rows, ascending
    refused: str | None = None  # the reason for ours throughout

    def takes(self, rows: int) -> bool:
        """Whether PyTorch's was faster at the timed number of rows next above, or at the largest."""
        if self.refused is not None or not self.timed:
            return False
        found = next((t for t in self.timed if t.rows >= rows), self.timed[-1])
        return found.grouped_mm < found.ours

    @property
    def settings(self) -> dict[str, Any]:
        """Times and choice, for a run's settings."""
        if self.refused is not None:
            return {"refused": self.refused}
        steps = [
            {"rows": t.rows, "ours_us": round(1e6 * t.ours, 1), "grouped_mm_us": round(1e6 * t.grouped_mm, 1)}
            for t in self.timed
        ]
        return {"grouped_mm_at": [t.rows for t in self.timed if self.takes(t.rows)], "steps": steps}


def product_of(model: Decoder, record: Record | None = None) -> ExpertProduct | None:
    """Time both for a model on its CUDA device, and have its layers take the faster; None without experts."""
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
    """The same for a model that denoises canvases."""
    experts = Matrices(*model.experts(), model.config.top_k, "gelu")
    model.product = found = choose(experts, device_seconds, record)
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def choose(experts: Matrices, time_of: Time, record: Record | None = None) -> ExpertProduct:
    """Time both on a device. record: captures the launches, as steps will be; None: steps are eager."""
    if library.at_hand() is None:
        return ExpertProduct(refused=f"PyTorch {torch.__version__} has no grouped product")
    if experts.gate_up.dtype not in library.DTYPES:
        return ExpertProduct(refused=f"experts in {experts.gate_up.dtype}, expected bf16")
    graphs: list[object] = []  # kept: smaller steps, recorded later, reuse their memory
    try:
        timed = [_time(experts, rows, time_of, record, graphs) for rows in reversed(ROWS)]
    except Exception as error:  # any error of the second product: ours is taken
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
