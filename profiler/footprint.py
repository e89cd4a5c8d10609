"""Bytes that a forward holds at its peak, next to weights and KV pages: activations, logits, inputs.

As in live/model.py; tests/live/test_footprint.py compares the count with PyTorch.
"""

from dataclasses import dataclass

from .models import BYTES, ModelShape

INPUT_BYTES = 4 * 8  # per row: token, position, place, whether it is sampled
# Serving code keeps bf16 logits, an fp32 copy and the softmax until a token is chosen.
LOGIT_BYTES = BYTES + 4 + 4


@dataclass(frozen=True)
class Implementation:
    """The tensors that an executor keeps alive; by default those of bf16 serving."""

    element: int = BYTES  # bytes of an activation
    gate_copies: int = 3  # of the feed-forward's width: gate, up, product
    logit_bytes: int = LOGIT_BYTES  # per logit, all copies


SERVING = Implementation()


def of_forward(
    model: ModelShape, tokens: int, head_rows: int, *, how: Implementation = SERVING, max_num_logits: int | None = None
) -> dict[str, int]:
    """Bytes by tensor at the peak of a forward of `tokens`; empty for none.

    head_rows: rows through the LM head. max_num_logits: most rows of logits at once; None: all.
    """
    rows = head_rows if max_num_logits is None else min(head_rows, max_num_logits)
    inputs = tokens * (INPUT_BYTES + how.element * model.head_dim)  # with RoPE's sines and cosines
    stream, heads = model.hidden, model.heads * model.head_dim
    in_layer = {
        # The residual stream and an addition to it, twice each; queries and attention's output. Keys are in pages.
        "activations of attention": tokens * how.element * (4 * stream + 2 * heads),
        "activations of the feed-forward": tokens * how.element * _feed_forward(model, how.gate_copies),
    }
    at_head = {
        "hidden states": (tokens + head_rows) * how.element * stream,
        "logits": rows * model.vocab * how.logit_bytes,
    }
    peak = max(in_layer, at_head, key=lambda tensors: sum(tensors.values()))
    return {name: size for name, size in {"inputs": inputs, **peak}.items() if size}


def _feed_forward(model: ModelShape, gate_copies: int) -> int:
    """Elements of a token in its widest feed-forward, and of its copies to experts and back."""
    mixed = model.experts
    if mixed is None:
        return gate_copies * model.ffn
    return gate_copies * max(model.ffn, (mixed.top_k + mixed.shared) * mixed.ffn) + 2 * mixed.top_k * model.hidden
