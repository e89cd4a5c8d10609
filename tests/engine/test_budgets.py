"""How many keys of a prompt MaskKV's layers and heads keep (full-sequence-diffusion.md 3.3, 3.4)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine.policies.maskkv import MaskKV, divided, head_budgets, layer_budgets

SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40)


@given(SHARES, st.integers(0, 400), st.data())
def test_parts_add_up_and_none_is_above_the_limit(shares: list[float], most: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(0, most * len(shares)))
    parts = divided(total, np.array(shares), most)
    assert parts.sum() == total
    assert ((parts >= 0) & (parts <= most)).all()
    # A larger share never gets less, and of equal ones the first no less.
    order = np.lexsort((-np.arange(len(shares)), shares))
    assert (np.diff(parts[order]) >= 0).all()


def test_what_a_limit_cuts_off_goes_to_the_others_in_proportion() -> None:
    assert divided(100, np.array([0.7, 0.2, 0.1]), 1000).tolist() == [70, 20, 10]
    assert divided(100, np.array([0.7, 0.2, 0.1]), 40).tolist() == [40, 40, 20]
    assert divided(100, np.array([0.7, 0.2, 0.1]), 45).tolist() == [45, 37, 18]
    # Just at the limit: it is full.
    assert divided(8, np.array([0.5, 0.3125, 0.1875]), 4).tolist() == [4, 3, 1]
    assert divided(10, np.array([1.0, 0.0, 0.0]), 4).tolist() == [4, 3, 3]
    assert divided(5, np.zeros(3), 4).tolist() == [2, 2, 1]


def test_layers_share_by_the_importance_of_their_group() -> None:
    rule = MaskKV(budget=100)
    # 400 keys: 160 alike; of 240 the boundary has 6 / 8 and the middle 2 / 8, in equal parts.
    assert layer_budgets(rule, np.array([5.0, 1.5, 0.5, 1.0]), 1000).tolist() == [130, 70, 70, 130]
    assert layer_budgets(rule, np.array([5.0, 1.5, 0.5, 1.0]), 120).tolist() == [120, 80, 80, 120]  # all there are
    assert layer_budgets(rule, np.zeros(4), 1000).tolist() == [100] * 4
    assert layer_budgets(rule, np.array([3.0, 1.0]), 1000).tolist() == [100] * 2  # no layer between the boundaries


def test_heads_share_by_their_preference_for_the_prompt() -> None:
    rule = MaskKV()
    # 400 keys: 10 each; of 360 in proportion to .9, .6, .3 and 0.
    assert head_budgets(rule, np.array([0.9, 0.6, 0.3, 0.0]), 100, 1000).tolist() == [190, 130, 70, 10]
    assert head_budgets(rule, np.array([0.9, 0.6, 0.3, 0.0]), 100, 160).tolist() == [160, 149, 80, 11]
    assert head_budgets(rule, np.zeros(4), 100, 1000).tolist() == [100] * 4
