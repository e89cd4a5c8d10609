"""The tensors that a forward holds at its peak, next to weights and KV pages: activations, logits and inputs.

Counted in dsim live's decoder (live/model.py). tests/live/test_footprint.py compares the count with PyTorch's
allocations.
"""

from dataclasses import dataclass

from .models import BYTES, ModelShape

INPUT_BYTES = 4 * 8  # of a row: its token, position, place, and whether it is sampled
# Serving code keeps bf16 logits, their fp32 copy and its soft-max until a token is chosen.
LOGIT_BYTES = BYTES + 4 + 4


@dataclass(frozen=True)
class Implementation:
    """The tensors that an executor keeps alive; the default serves in bf16."""

    element: int = BYTES  # bytes of an activation
    gate_copies: int = 3  # of the feed-forward's width: gate and up, and their product
    logit_bytes: int = LOGIT_BYTES  # of a row's logit, all copies


SERVING = Implementation()


def of_forward(
    model: ModelShape, tokens: int, head_rows: int, *, how: Implementation = SERVING, max_num_logits: int | None = None
) -> dict[str, int]:
    """Bytes by tensor at the peak of a forward of `tokens`; empty for 0 tokens.

    head_rows: rows through the LM head. max_num_logits: rows of logits that exist at once; None: all.
    """
    rows = head_rows if max_num_logits is None else min(head_rows, max_num_logits)
    inputs = tokens * (INPUT_BYTES + how.element * model.head_dim)  # RoPE's sines and cosines among them
    stream, heads = model.hidden, model.heads * model.head_dim
    in_layer = {
        # The residual stream twice and what the halves add to it, queries and what they read. Keys lie in pages.
        "activations of attention": tokens * how.element * (4 * stream + 2 * heads),
        "activations of the feed-forward": tokens * how.element * (how.gate_copies * _width(model) + _moved(model)),
    }
    at_head = {
        "hidden states": (tokens + head_rows) * how.element * stream,
        "logits": rows * model.vocab * how.logit_bytes,
    }
    peak = max(in_layer, at_head, key=lambda found: sum(found.values()))
    return {name: size for name, size in {"inputs": inputs, **peak}.items() if size}


def _width(model: ModelShape) -> int:
    """The width of the widest feed-forward that a token takes."""
    mixed = model.experts
    return max(model.ffn, (mixed.top_k + mixed.shared) * mixed.ffn if mixed else 0)


def _moved(model: ModelShape) -> int:
    """Elements of a token's copies on the way to its experts and back."""
    return 2 * model.experts.top_k * model.hidden if model.experts else 0
