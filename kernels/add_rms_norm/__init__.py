"""Add a sub-layer's output to the residual stream, and norm the sum."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import rms_norm

from ..operation import operation


@operation("x float N h", "weight x h", "added x N h")
def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and its root-mean-square norm times weight, both [N, h] in x's dtype; sums are in fp32.

    x, added [N, h], weight [h], of one dtype. added None: returns x and its norm.
    """
    x = x if added is None else x + added
    return x, rms_norm(x, weight.shape, weight, eps)


def _check_parts(parts: Sequence[Tensor], part_weights: Tensor | None, **_: object) -> None:
    if len(parts) not in (1, 2) or (part_weights is None) != (len(parts) == 1):
        label = "no weights" if part_weights is None else "weights"
        raise ValueError(f"there are {len(parts)} parts and {label} of parts, expected 1 without or 2 with")


@operation(
    "x float N h", "parts x N h", "part_weights float32 2 h", "scale float32 1", "weight float32 h", "after float32 h",
    check=_check_parts,
)  # fmt: skip
def sandwich_norm(
    x: Tensor, parts: Sequence[Tensor], part_weights: Tensor | None, weight: Tensor, scale: Tensor | None,
    after: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new stream (x + norm(sum of parts) * weight) * scale, and its norm times `after`, both [N, h] (Gemma).

    One part is added as it is; each of two is first normed and multiplied by its row of part_weights [2, h]. Norms are
    root-mean-square, in fp32; each step is rounded to x's dtype.

    x and parts [N, h] of one dtype; weight and after [h], scale [1] or None for 1, and part_weights in fp32.
    """

    def normed(rows: Tensor, factors: Tensor) -> Tensor:
        return rms_norm(rows.float(), factors.shape, factors, eps).to(x.dtype)

    total = parts[0]
    if part_weights is not None:
        total = normed(parts[0], part_weights[0]) + normed(parts[1], part_weights[1])
    x = x + normed(total, weight)
    if scale is not None:
        x = (x.float() * scale).to(x.dtype)
    return x, normed(x, after)
