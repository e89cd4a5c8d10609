"""What scenarios by hand share: a world with its first requests, and what holds when all have ended."""

from typing import Any, TypeVar

W = TypeVar("W")  # a World or a Served


def asked(world: W, *lengths: tuple[int, int]) -> W:
    """The world, in which requests of these input and output lengths wait."""
    given: Any = world
    for index, (prompt, output) in enumerate(lengths):
        given.submit(index, prompt, output)
    return world


def check_over(world: Any) -> None:
    """Nothing is left to do, and nothing is held."""
    assert world.schedule() == "nothing"
    assert (world.engine.pages_held, world.engine.expected_tokens) == (0, 0)
