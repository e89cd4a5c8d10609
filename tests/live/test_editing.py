"""JointThreshold against its loop written out, position by position."""

import numpy as np
import pytest

from dsim.engine.policies.sglang import JointThreshold
from dsim.live.editing import edit

MASK, VOCAB, BLOCK = 9, 9, 6


def plainly(
    rule: JointThreshold, text: list[int], prompt: int, said: list[int], sure: list[float], post: int
) -> tuple[list[int], bool]:
    """One forward of one block: its tokens, and whether it is done."""
    masks = [p for p in range(BLOCK) if text[p] == MASK]
    if not masks and post >= rule.max_post_edit_steps:
        return text, True
    new = list(text)
    for p in range(BLOCK):
        if text[p] == MASK:
            if sure[p] > rule.threshold or p == max(masks, key=lambda q: (sure[q], -q)):
                new[p] = said[p]
        elif p >= prompt and said[p] != text[p] and sure[p] > rule.edit_threshold:
            new[p] = said[p]
    return new, not masks and new == text


@pytest.mark.parametrize(
    "rule",
    [
        JointThreshold(threshold=t, edit_threshold=e, max_post_edit_steps=n)
        for t, e, n in ((0.5, 0.0, 16), (0.7, 0.6, 2), (0.99, 0.99, 0))
    ],
)
def test_blocks_go_as_the_loop_has_them_to_their_end(rule: JointThreshold) -> None:
    chance = np.random.default_rng(3)
    rows = 5
    prompt = chance.integers(0, 4, rows)
    text = np.where(np.arange(BLOCK) < prompt[:, None], chance.integers(0, VOCAB, (rows, BLOCK)), MASK)
    post, done = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    likely = chance.integers(0, VOCAB, (rows, BLOCK))
    steps = 0
    while not done.all():
        steps += 1
        # Predictions settle: a share of them changes, the less the later.
        changes = chance.random(likely.shape) < 0.5 / steps**2
        likely = np.where(changes, chance.integers(0, VOCAB, likely.shape), likely)
        sure = chance.random(likely.shape).astype(np.float32)
        masked = text == MASK
        found = edit(rule, text, likely, sure, masked, np.arange(BLOCK) >= prompt[:, None], post)
        for i in range(rows):
            expected, over = plainly(
                rule, text[i].tolist(), int(prompt[i]), likely[i].tolist(), sure[i].tolist(), int(post[i])
            )
            assert (found.tokens[i].tolist(), bool(found.done[i])) == (expected, over)
        assert ((found.tokens != text) == (found.committed | found.edited)).all()
        assert (found.committed <= masked).all()
        post += ~masked.any(axis=1)
        text, done = found.tokens, found.done
    assert steps > 2


def test_a_block_ends_when_its_edits_are_used_up_though_the_model_wants_more() -> None:
    rule = JointThreshold(threshold=0.5, edit_threshold=0.0, max_post_edit_steps=2)
    text, said = np.array([[1, 2]]), np.array([[2, 1]])
    whole = np.ones((1, 2), np.bool_)
    for post, over in ((0, False), (1, False), (2, True)):
        found = edit(rule, text, said, np.ones((1, 2), np.float32), ~whole, whole, np.array([post]))
        assert bool(found.done[0]) == over
        assert found.tokens.tolist() == (text if over else said).tolist()
