"""The experts of each row, against a loop over its scores."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsim.kernels.route_experts import route_experts

from .places import Place, normal


def by_the_book(
    row: list[float], bias: list[float], top_k: int, given: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """One row's experts and weights in Python's floats."""
    x = torch.tensor(row, dtype=torch.float64)
    scores = (x.sigmoid() if given["scoring"] == "sigmoid" else x.softmax(0)).tolist()
    preferred = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(row) // given["groups"]
    sums = {g: sum(sorted(preferred[g * size : (g + 1) * size])[-2:]) for g in range(given["groups"])}
    in_ = sorted(sums, key=lambda g: (-sums[g], g))[: given["top_groups"]] if given["groups"] > 1 else [0]
    open_ = [e for e in range(len(row)) if e // size in in_]
    chosen = sorted(open_, key=lambda e: (-preferred[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) if given["normed"] and top_k > 1 else 1.0
    by_expert = given.get("expert_scale")
    return chosen, [
        scores[e] / total * given["scale"] * (1.0 if by_expert is None else float(by_expert[e])) for e in chosen
    ]


def check(place: Place, logits: Tensor, bias: Tensor | None, top_k: int, **given: Any) -> None:
    chosen, weights = place.call(route_experts, logits, bias, top_k, **given)
    assert (chosen.dtype, weights.dtype, chosen.shape) == (torch.int64, torch.float32, weights.shape)
    added = [0.0] * logits.shape[1] if bias is None else bias.double().tolist()
    for row, found, weight in zip(logits.double().tolist(), chosen.tolist(), weights, strict=True):
        expected, of_them = by_the_book(row, added, top_k, given)
        assert found == expected
        torch.testing.assert_close(weight.double(), torch.tensor(of_them).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("num_rows", "num", "top_k", "bias", "given"),
    [
        (5, 128, 8, False, {}), (3, 6, 2, False, {"normed": False}), (2, 5, 1, True, {"scale": 2.5}),
        (4, 256, 8, True, {"scoring": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}),
        (7, 12, 3, True, {"scoring": "sigmoid", "groups": 3, "top_groups": 1}),
        (6, 20, 5, False, {"groups": 5, "top_groups": 2}), (0, 4, 2, False, {}),
        (3, 12, 3, False, {"expert_scale": normal(5, 12)}),
    ],
)  # fmt: skip
def test_a_row_gets_its_best_experts_and_their_weights(
    place: Place, num_rows: int, num: int, top_k: int, bias: bool, given: dict[str, Any]
) -> None:
    plain = {"scoring": "softmax", "groups": 1, "top_groups": 1, "normed": True, "scale": 1.0}
    check(place, 2 * normal(num, num_rows, num), normal(1, num) / 4 if bias else None, top_k, **plain | given)


def test_ties_go_to_the_lowest_expert_and_the_lowest_group(place: Place) -> None:
    logits = torch.tensor([[0.0] * 8, [0, 0, 0, 0, 1, 0, 1, 0], [3, -9, 0, 0, 0, 0, 0, 0.0], [-200.0] * 8])
    chosen, _ = place.call(route_experts, logits, None, 3)
    assert chosen.tolist() == [[0, 1, 2], [4, 6, 0], [0, 2, 3], [0, 1, 2]]
    chosen, _ = place.call(route_experts, logits, None, 3, scoring="sigmoid", groups=4, top_groups=2)
    assert chosen.tolist() == [[0, 1, 2], [4, 6, 5], [2, 3, 4], [0, 1, 2]]


def test_logits_may_be_columns_of_a_wider_tensor(place: Place) -> None:
    wide = normal(3, 4, 20)
    check(place, wide[:, 3:11], None, 2, scoring="softmax", groups=1, top_groups=1, normed=True, scale=1.0)
