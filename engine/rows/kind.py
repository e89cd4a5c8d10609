"""A kind of rows: rules that plan, draw and commit them, and the questions these ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Rows planned and committed alike."""

    name: str
    rules: Mapping[Any, Callable[..., Any]]  # question of hooks.py -> answer for these rows
    asks: tuple[Any, ...]  # questions that the rules ask in turn
    commits: str = "masks"  # a row commits masks of its block, or next tokens

    def __str__(self) -> str:
        return self.name
