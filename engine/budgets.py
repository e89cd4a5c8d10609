"""How many keys of a prompt MaskKV keeps: of all layers, each layer's; of a layer, each head's (3.3, 3.4).

The paper's formulas, and what it leaves open: no head keeps more than there are, what that leaves over goes to the
others in proportion, what rounding down leaves over goes out one each, and a prompt within the budget is kept whole. So
the mean over heads and layers is the budget, or the prompt.
"""

import numpy as np
import numpy.typing as npt

from .policies.maskkv import MaskKV

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def layer_budgets(rule: MaskKV, importance: Floats, prompt: int) -> Ints:
    """Prompt keys that a head of each layer keeps in the mean, [layers].

    importance [layers]: how much a layer's attention changes its input, 1 - cos (eq. 8). The boundary layers have a
    share by their importance together, and divide it equally; so have the others.
    """
    n = len(importance)
    if prompt <= rule.budget:
        return np.full(n, prompt, np.int64)
    group = np.zeros(n, np.int64)
    group[list(rule.boundary)] = 1
    members, weights = np.bincount(group, minlength=2), np.bincount(group, weights=importance, minlength=2)
    apart = np.full(n, 1 / n)
    if members.all() and weights.sum() > 0:
        apart = (weights / weights.sum() / members)[group]
    return divided(n * rule.budget, rule.beta / n + (1 - rule.beta) * apart, prompt)


def head_budgets(rule: MaskKV, preference: Floats, mean: int, prompt: int) -> Ints:
    """Prompt keys that each head of a layer keeps, `mean` of them in the mean, [heads].

    preference [heads]: of what masks attend to in the prompt and in masks, the prompt's share (eq. 14).
    """
    n = len(preference)
    apart = preference / preference.sum() if preference.sum() > 0 else np.full(n, 1 / n)
    return divided(n * mean, rule.alpha / n + (1 - rule.alpha) * apart, prompt)


def divided(total: int, shares: Floats, most: int) -> Ints:
    """`total` divided by shares into whole numbers of at most `most`; total is at most as many times that."""
    wanted = np.full(len(shares), float(most))
    open_ = np.ones(len(shares), np.bool_)  # below the limit
    while open_.any():
        left, own = total - most * int((~open_).sum()), shares[open_]
        wanted[open_] = left * (own / own.sum() if own.sum() > 0 else 1 / len(own))
        over = open_ & (wanted >= most)
        if not over.any():
            break
        wanted[over] = most
        open_ &= ~over
    parts = wanted.astype(np.int64)
    order = np.argsort(np.where(open_, -shares, np.inf), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts
