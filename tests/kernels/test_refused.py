"""Launchers refuse what makes no sense, in one line with the value found and the value expected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsim.kernels.confidence import confidence, confidence_of_hidden
from dsim.kernels.focus_importance import focus_importance
from dsim.kernels.grouped_experts import grouped_experts
from dsim.kernels.pooled_topk_pack import Choice, pooled_topk_pack
from dsim.kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope
from dsim.kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from dsim.kernels.read_logits import read_logits

from ..checks import cases
from ..worlds import refusal
from .places import int32

PAGES = torch.zeros(3, 16, 2, 8)
Q, K = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8)
ONE, NINE = int32(1), int32(0, 9)
# Arguments by name that each launcher takes; those of a record stand next to it.
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    confidence: {"logits": torch.zeros(2, 3), "temperature": 1.0},
    confidence_of_hidden: {"hidden": torch.ones(3, 4), "head": torch.ones(9, 4), "max_num_logits": 4},
    focus_importance: {"q": Q, "k": K, "masked": torch.tensor([1, 2, 5]), "masked_start": int32(0, 3)},
    grouped_experts: {
        "x": torch.ones(4, 8), "experts": torch.zeros(4, 2).long(), "weights": torch.ones(4, 2),
        "gate_up": torch.ones(5, 6, 8), "down": torch.ones(5, 8, 3), "activation": "silu",
    },
    pooled_topk_pack: {
        "q": torch.zeros(2, 4, 8), "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8), "k_pages": PAGES,
        "v_pages": PAGES, "query_start": int32(0, 2), "key_start": NINE, "block_start": int32(4), "num_kept": int32(3),
        "page_table": torch.zeros(1, 2, dtype=torch.int32), "pool": 3, "shared": False,
    },
    qk_norm_rope: {
        "qkv": torch.zeros(3, 8, 8), "num_heads": 4, "q": torch.ones(8), "k": torch.ones(8), "eps": 1e-6,
        "cos": torch.ones(3, 4), "sin": torch.zeros(3, 4), "keys": PAGES, "values": PAGES, "slots": torch.arange(3),
    },
    ragged_paged_attention: {
        "q": Q[:4], "k_pages": PAGES, "v_pages": PAGES, "page_table": int32(0, 1, 2, 2, 1, 0).view(2, 3),
        "query_start": int32(0, 3, 4), "positions": int32(8, 9, 10, 21), "history": int32(8, 20),
        "listed": torch.ones(2, 4, dtype=torch.bool), "block_length": 4, "spare": 0,
    },
    read_logits: {
        "logits": torch.ones(3, 8), "temperature": torch.ones(3), "uniform": torch.ones(3), "cap": 30.0,
    },
}  # fmt: skip
RECORDS: dict[Callable[..., Any], dict[str, Any]] = {
    pooled_topk_pack: {"choice": Choice},
    qk_norm_rope: {"norms": Norms, "turns": Turns, "pages": Pages},
    ragged_paged_attention: {"sequences": Sequences},
}


def call(launcher: Callable[..., Any], changes: dict[str, Any]) -> None:
    arguments = CALLS[launcher] | changes
    for name, record in RECORDS.get(launcher, {}).items():
        arguments[name] = record(**{field: arguments.pop(field) for field in record._fields})
    launcher(**arguments)


def wrong(tensor: Tensor) -> dict[str, Tensor]:
    """Variants of a tensor that no launcher takes, by the words that its message says."""
    other = tensor.double() if tensor.is_floating_point() else tensor.to(torch.uint8)
    found = {"has shape": tensor[None], "is torch": other, "is on meta": tensor.to("meta")}
    if tensor.shape[-1] > 1:
        found["has stride"] = tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return found


@pytest.mark.parametrize("launcher", CALLS, ids=lambda f: f.__name__)
def test_every_tensor_has_its_shape_dtype_device_and_strides(launcher: Callable[..., Any]) -> None:
    call(launcher, {})
    tensors = {name: value for name, value in CALLS[launcher].items() if isinstance(value, Tensor)}
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        for words, variant in wrong(tensor).items():
            if (name, words) != (first, "is on meta"):  # the first tensor's device is that of the call
                said = refusal(ValueError, call, launcher, {name: variant})
                assert (said.startswith(f"{name} {words}"), "expected" in said) == (True, True), said


@cases(
    "launcher changes message",
    (confidence, {"temperature": -1.0}, "temperature is -1.0, expected a finite number of at least 0"),
    (grouped_experts, {"gate_up": torch.ones(5, 7, 8)}, "gate_up has 7 rows an expert, expected 6"),
    (grouped_experts, {"activation": "relu"}, "activation is 'relu', expected silu or gelu"),
    (pooled_topk_pack, {"pool": 4}, "pool is 4, expected an odd number of at least 1"),
    (qk_norm_rope, {"num_heads": 3}, "qkv has 8 heads, expected 7: 3 and twice 2"),
    (qk_norm_rope, {"q": None}, "one norm's weight is None, expected both or neither"),
    (ragged_paged_attention, {"block_length": 0}, "block_length is 0, expected at least 1"),
    (ragged_paged_attention, {"window": -1}, "window is -1, expected at least 0"),
    (read_logits, {"cap": 0.0}, "cap is 0.0, expected a finite number above 0"),
)
def test_values_out_of_range_are_refused_with_both_values(
    launcher: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    assert refusal(ValueError, call, launcher, changes).startswith(message)
