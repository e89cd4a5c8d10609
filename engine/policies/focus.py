"""FOCUS: DC+, and after the second layer only masks whose importance grew most."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ..draw import delta_row, draw_slot, masks_of, row_of
from ..errors import PolicyError
from ..hooks import block_entered, draw_rows, learn, placed, plan_rows, preempted, select
from ..jit import plain, rule
from ..part import MAX_BLOCK, Answers, Policy, Preset, Range
from ..records import I4, Record, columns_of
from ..rows.blocks import plan_block, visible_keys
from ..state import MASKED, Draws, Marks, Masks, PolicyState, Replica, Status, step_slots
from ..step import Evicting, StepPlan
from .delayed_cache import NeighbourCache
from .lmdeploy_2025 import EVERY_STEP_AHEAD
from .whole_block import select_pending_first


class FocusColumns(Record):
    decoded: I4  # tokens of the block
    decode_steps: I4  # steps that decoded any
    progress: I4  # rightmost column of the block through all layers, or -1
    budget: I4  # least masks to keep in this step


FocusState = PolicyState[Any, FocusColumns, Any]


@dataclass(frozen=True)
class Focus(NeighbourCache):
    """FOCUS: keeps masks whose importance grows most from the first layer to the second, over DC+ (focus.md 3).

    Where published codes differ (3.11), it does as LMDeploy's.
    """

    sample_block: Annotated[bool, "soft-max and sampling run on the whole block (focus.md 3.2)"] = True
    alpha: Annotated[float, Range(1.0), "budget, as a multiple of the block's mean tokens decoded per step"] = 1.5

    columns = columns_of(FocusColumns)
    neutral = frozenset({"sample_block"})
    by_importance = True

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if policy.batching.group_steps(1, 1) != 1:
            raise PolicyError(
                f"{policy.name}: FOCUS decides every step anew: expected continuous batching with num_loops=1"
            )

    def numbers(self, policy: Policy) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "alpha": float(self.alpha)}

    def answers(self, policy: Policy) -> Answers:
        return {
            **super().answers(policy),
            plan_rows: plan_focus,
            draw_rows: draw_focus,
            learn: learn_yield,
            select: select_pending_first,
            placed: start_block,
            preempted: focus_preempted,
            block_entered: start_block,
        }

    def record(self, policy: Policy) -> dict[str, Any]:
        kinds = {"decodable": np.uint8, "delta": np.float32, "spots": np.int64, "selected": np.uint8}
        return {name: np.zeros(MAX_BLOCK, kind) for name, kind in kinds.items()}  # one compilation for all blocks

    def evicting(self, rows: Any) -> Evicting:
        return Evicting(self, rows["decoded"].copy(), rows["decode_steps"].copy(), rows["progress"].copy())

    def retained(self, evicting: Evicting, status: Any, window: Any, delta: npt.NDArray[np.float32]) -> Any:
        """Retained positions of a window by masks' growth of importance, [rows, width] bool."""
        counts = zip(evicting.num_decoded.tolist(), evicting.num_steps.tolist(), strict=True)
        budgets = np.array([_budget(decoded, steps, float(self.alpha)) for decoded, steps in counts], np.int64)
        return retained_by_growth(status, window, delta, evicting.progress, budgets)

    def draw_retained(self, plan: StepPlan, draws: Draws, decodable: npt.NDArray[np.bool_]) -> Any:
        """Retained positions of a plan's window, [rows, width] bool."""
        assert plan.evicting is not None
        return self.retained(plan.evicting, plan.status, plan.window, drawn_growth(plan.masks, decodable, draws))


@rule
def drawn_growth(masks: Masks, decodable: npt.NDArray[np.bool_], draws: Draws) -> Any:
    """Growth of importance of a plan's masks, [rows, width], by whether each is decodable."""
    delta = np.zeros(masks.window.shape, np.float32)
    for i in range(len(delta)):
        delta_row(row_of(masks, i), decodable[i], draws, delta[i])
    return delta


@rule
def retained_by_growth(
    status: Any, window: Any, delta: npt.NDArray[np.float32], progress: Any, budgets: npt.NDArray[np.int64]
) -> Any:
    """Positions retained by rows whose growth of importance is known, [rows, width] bool."""
    keep = window.copy()
    spots, selected = np.zeros(window.shape[1], np.int64), np.zeros(window.shape[1], np.uint8)
    for i in range(len(window)):
        retain(status[i], delta[i], int(budgets[i]), int(progress[i]), keep[i], spots, selected)
    return keep


@rule
def budget(num_decoded: int, num_steps: int, alpha: float) -> int:
    """Least masks of a sequence to keep; with no more, nothing is evicted."""
    mean = num_decoded / max(num_steps, 1)
    return max(1, int(np.ceil(max(mean, 1.0) * alpha)))


_budget = plain(budget)


@rule
def plan_focus(replica: Replica, policy: FocusState) -> None:
    """Plan a step over uncached positions; it evicts if a sequence has more masks than its budget."""
    plan_block(replica, policy)
    counters, fields = replica.counters, policy.fields
    for slot in step_slots(replica):
        columns = policy.columns[slot]
        num = 0
        for k in range(replica.window.shape[1]):
            if replica.window[slot, k] and replica.status[slot, k] == MASKED:
                num += 1
        budgeted = budget(columns.decoded, columns.decode_steps, fields.alpha)
        columns.budget = min(num, budgeted)
        if num > budgeted:
            counters.evicting = True


@rule
def draw_focus(replica: Replica, policy: FocusState, draws: Draws) -> None:
    """Draw retained positions, and masks among them that commit.

    Deltas depend on whether a mask is decodable: would commit without eviction.
    """
    counters = replica.counters
    if not counters.evicting:
        for slot in step_slots(replica):
            draw_slot(replica, slot, replica.window[slot], replica.committed[slot], draws)
        return
    record = policy.record
    decodable, delta = record.decodable, record.delta
    for slot in step_slots(replica):
        columns = policy.columns[slot]
        draw_slot(replica, slot, replica.window[slot], decodable, draws)
        delta_row(masks_of(replica, slot, replica.window[slot]), decodable, draws, delta)
        keep = replica.retained[slot]
        for k in range(len(keep)):
            keep[k] = replica.window[slot, k]
        retain(replica.status[slot], delta, columns.budget, columns.progress, keep, record.spots, record.selected)
        draw_slot(replica, slot, replica.retained[slot], replica.committed[slot], draws)
    count_retained(replica, policy)


@rule
def count_retained(replica: Replica, policy: FocusState) -> None:
    """The step's features after eviction."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    tokens = 0
    qk_pairs = 0
    keys = 0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        num, visible, own_pairs = visible_keys(replica.status[slot], replica.retained[slot], fixed.block, fields.listed)
        start = int(sequence.start)
        sequence.num_retained = num
        tokens += num
        qk_pairs += num * start + own_pairs
        keys += start + visible
    counters.left_tokens = tokens
    counters.left_q_kv = qk_pairs
    counters.left_kv = keys
    counters.left_sampled = tokens
    if fields.sample_block:
        counters.left_sampled = counters.sampled_rows


@rule
def retain(status: Status, delta: Any, budgeted: int, progress: int, keep: Marks, spots: Any, selected: Any) -> None:
    """Unmark the positions of a row's window, `keep` [width], that do not go on (focus.md 3.4).

    delta: importance in the second layer minus the first. progress: rightmost position retained in this block, or -1.
    Kept: tokens a standard deviation above the mean, or if fewer the budget's most important (ties: lower index); each
    one's left neighbour; all between progress and the rightmost kept one, whose keys were never computed. Sums in
    double precision from the left agree bit for bit across implementations. spots, selected: [width], scratch.
    """
    num = 0
    for k in range(len(keep)):
        if keep[k] and status[k] == MASKED:
            spots[num] = k
            num += 1
    if num <= budgeted:
        return
    total = 0.0
    for j in range(num):
        total += np.float64(delta[spots[j]])
    mean = total / num
    total = 0.0
    for j in range(num):
        deviation = np.float64(delta[spots[j]]) - mean
        total += deviation * deviation
    high = mean + np.sqrt(total / num)
    num_kept = 0
    for j in range(num):
        if np.float64(delta[spots[j]]) >= high:
            num_kept += 1
    num_kept = max(num_kept, int(budgeted))
    for j in range(num):
        growth = delta[spots[j]]
        before = 0  # of higher rank: greater, or equal and to the left
        for k in range(num):
            other = delta[spots[k]]
            if other > growth or (other == growth and k < j):
                before += 1
        selected[j] = before < num_kept
    rightmost = -1
    for j in range(num):
        retained = selected[j] != 0 or (j + 1 < num and selected[j + 1] != 0 and spots[j + 1] == spots[j] + 1)
        keep[spots[j]] = retained
        if retained:
            rightmost = spots[j]
    for j in range(num):
        if progress < spots[j] and spots[j] < rightmost:
            keep[spots[j]] = True


@rule
def learn_yield(replica: Replica, policy: FocusState, prefill: bool) -> None:
    """Update mean and progress; steps that decode nothing do not count (focus.md 3.1)."""
    if prefill:
        return
    counters = replica.counters
    for slot in step_slots(replica):
        columns = policy.columns[slot]
        num = 0
        for k in range(replica.window.shape[1]):
            went_through = replica.window[slot, k]
            if counters.evicting:
                went_through = replica.retained[slot, k]
            if went_through and k > columns.progress:
                columns.progress = k
            if replica.committed[slot, k]:
                num += 1
        if num > 0:
            columns.decoded += num
            columns.decode_steps += 1


@rule
def start_block(replica: Replica, policy: FocusState, slot: int) -> None:
    """A new block: its mean and its progress begin again."""
    columns = policy.columns[slot]
    columns.decoded = 0
    columns.decode_steps = 0
    columns.progress = -1


@rule
def focus_preempted(replica: Replica, policy: FocusState, slot: int) -> None:
    policy.columns[slot].progress = -1


PRESETS = {
    "focus": Preset(
        Policy("focus", batching=EVERY_STEP_AHEAD, eviction=Focus()),
        "alpha",
        "FOCUS: DC+, and of the masks only those whose importance grew most go beyond the second layer",
        "FOCUS (focus.md 3)",
    )
}
