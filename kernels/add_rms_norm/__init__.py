"""Add a sub-layer's output to the residual stream, and norm the sum."""

from collections.abc import Sequence

from torch import Tensor, float32

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and its root-mean-square norm times weight, both [N, h] in x's dtype; sums are in fp32.

    x, added [N, h], weight [h], of one dtype. added None: returns x and its norm.
    """
    check_tensor("x", x, x.device, FLOATS, "N", "h")
    check_tensor("weight", weight, x.device, x.dtype, x.shape[1])
    if added is not None:
        check_tensor("added", added, x.device, x.dtype, *x.shape)
    return run(reference.add_rms_norm, x, x, added, weight, eps)


def sandwich_norm(
    x: Tensor, parts: Sequence[Tensor], part_weights: Tensor | None, weight: Tensor, scale: Tensor | None,
    after: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new stream (x + norm(sum of parts) * weight) * scale, and its norm times `after`, both [N, h] (Gemma).

    One part is added as it is; each of two is first normed and multiplied by its row of part_weights [2, h]. Norms are
    root-mean-square, in fp32; each step is rounded to x's dtype.

    x and parts [N, h] of one dtype; weight and after [h], scale [1] or None for 1, and part_weights in fp32.
    """
    check_tensor("x", x, x.device, FLOATS, "N", "h")
    width = x.shape[1]
    if len(parts) not in (1, 2) or (part_weights is None) != (len(parts) == 1):
        found = "no weights" if part_weights is None else "weights"
        raise ValueError(f"there are {len(parts)} parts and {found} of parts, expected 1 without or 2 with")
    for i, part in enumerate(parts):
        check_tensor(f"parts[{i}]", part, x.device, x.dtype, *x.shape)
    if part_weights is not None:
        check_tensor("part_weights", part_weights, x.device, float32, 2, width)
    if scale is not None:
        check_tensor("scale", scale, x.device, float32, 1)
    check_tensor("weight", weight, x.device, float32, width)
    check_tensor("after", after, x.device, float32, width)
    return run(reference.sandwich_norm, x, x, parts, part_weights, weight, scale, after, eps)
