"""ShareGPT conversations: lengths estimated from texts, no arrivals."""

import numpy as np

from .parse import BYTES_PER_TOKEN, Columns, num_tokens
from .rows import Row, Rows

MIN_TOKENS = 2  # SGLang and LMDeploy also skip shorter ones


def is_sharegpt(row: Row | str) -> bool:
    return isinstance(row, dict) and isinstance(row.get("conversations", row.get("conversation")), list)


def columns_of_conversations(found: Rows) -> Columns:
    """The first two turns as prompt and answer; all arrive at 0."""
    lengths: list[tuple[int, int]] = []
    for row in found.rows:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        texts = [text_of(turn) for turn in turns[:2]] if isinstance(turns, list) else []
        if len(texts) == 2 and all(texts):
            pair = num_tokens(texts[0]), num_tokens(texts[1])
            if min(pair) >= MIN_TOKENS:
                lengths.append(pair)
    pairs = np.array(lengths, np.int64).reshape(-1, 2)
    dropped = len(found.rows) - len(lengths)
    warnings = [
        f"token counts are estimates ({BYTES_PER_TOKEN} bytes a token)",
        "conversations have no arrival times: choose an arrival process and a rate",
    ]
    if dropped:
        warnings.append(f"dropped {dropped} conversations of fewer than two turns, or with a turn under 2 tokens")
    return Columns(
        np.zeros(len(pairs)), pairs[:, 0].copy(), pairs[:, 1].copy(), num_rows=len(found.rows), warnings=warnings
    )


def text_of(turn: object) -> str:
    text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    return text if isinstance(text, str) else ""
