"""Pages of layers that see a window of tokens alone: taken from the pool that all layers share, as a step needs them.

Such layers hold the tokens that a step computes and those in sight of its first. What has left the window comes free as
the next step is decided on, as in vLLM's hybrid manager (`remove_skipped_blocks`), which keeps one pool of equal pages
for all groups of layers. A page is `page_size` tokens in the layers that see all; as many tokens of the others take
`window_bytes / kv_bytes` of one. SGLang divides the pages at the start instead (`window_pool`).
"""

from .jit import rule
from .state import Fixed


@rule
def in_sight(fixed: Fixed, start: int, end: int) -> int:
    """Pages for tokens up to `end` in the layers with a window, in a step whose first query is `start`.

    f: state.REPLICA. 0 where there are no such layers.
    """
    if fixed.keeps == 0:
        return 0
    return shared(fixed, -(-int(end) // int(fixed.page)) - num_left(fixed, start))


@rule
def have_room(fixed: Fixed, pages: int, seen: int) -> bool:
    """Whether so many pages fit, `seen` of layers with a window and `pages` of the others: in one pool or in two."""
    if fixed.window_pool > 0:
        return bool(pages <= fixed.num_pages - fixed.window_pool and seen <= fixed.window_pool)
    return bool(pages + seen <= fixed.num_pages)


@rule
def num_left(fixed: Fixed, start: int) -> int:
    """Pages of a sequence that a window has left where the next query is `start`."""
    return max(0, int(start) - int(fixed.keeps) + 1) // int(fixed.page) if fixed.keeps > 0 else 0


@rule
def window_groups(fixed: Fixed) -> int:
    """Groups of layers with a window: each takes a page of the pool where the layers that see all take one."""
    return -(-int(fixed.window_bytes) // int(fixed.kv_bytes)) if fixed.keeps > 0 else 0


@rule
def most_in_sight(fixed: Fixed, end: int, at_once: int) -> int:
    """The most that `in_sight` may come to be up to `end`, where a step has at most so many positions of a sequence."""
    if fixed.keeps == 0:
        return 0
    # A window may begin within a page.
    return shared(
        fixed, min(-(-int(end) // int(fixed.page)), -(-(int(fixed.keeps) - 1 + int(at_once)) // int(fixed.page)) + 1)
    )


@rule
def shared(fixed: Fixed, pages: int) -> int:
    """Pages of the pool that so many of a window's take."""
    return -(-pages * int(fixed.window_bytes) // int(fixed.kv_bytes))
