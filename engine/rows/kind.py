"""A kind of rows: the rules that plan, draw and commit them, and the questions that these ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Rows of a step that are planned and committed alike."""

    name: str
    rules: Mapping[Any, Callable[..., Any]]  # question of hooks.py -> its answer for such rows
    asks: tuple[Any, ...]  # questions that these rules ask in turn
    commits: str = "masks"  # of a row: masks of its block, or next tokens

    def __str__(self) -> str:
        return self.name
