"""Pages of layers that see a window of tokens alone: taken from the pool that all layers share, as a step needs them.

Such layers hold the tokens that a step computes and those in sight of its first. What has left the window comes free as
the next step is decided on, as in vLLM's hybrid manager (`remove_skipped_blocks`), which keeps one pool of equal pages
for all groups of layers. A page is `page_size` tokens in the layers that see all; as many tokens of the others take
`window_bytes / kv_bytes` of one. SGLang divides the pages at the start instead (`window_pool`).
"""

from typing import Any

from .jit import rule


@rule
def in_sight(f: Any, start: Any, end: Any) -> Any:
    """Pages for tokens up to `end` in the layers with a window, in a step whose first query is `start`.

    f: state.REPLICA. 0 where there are no such layers.
    """
    if f.keeps == 0:
        return 0
    return shared(f, -(-int(end) // int(f.page)) - num_left(f, start))


@rule
def have_room(f: Any, pages: Any, seen: Any) -> bool:
    """Whether so many pages fit, `seen` of layers with a window and `pages` of the others: in one pool or in two."""
    if f.window_pool > 0:
        return bool(pages <= f.num_pages - f.window_pool and seen <= f.window_pool)
    return bool(pages + seen <= f.num_pages)


@rule
def num_left(f: Any, start: Any) -> Any:
    """Pages of a sequence that a window has left where the next query is `start`."""
    return max(0, int(start) - int(f.keeps) + 1) // int(f.page) if f.keeps > 0 else 0


@rule
def window_groups(f: Any) -> Any:
    """Groups of layers with a window: each takes a page of the pool where the layers that see all take one."""
    return -(-int(f.window_bytes) // int(f.kv_bytes)) if f.keeps > 0 else 0


@rule
def most_in_sight(f: Any, end: Any, at_once: Any) -> Any:
    """The most that `in_sight` may come to be up to `end`, where a step has at most so many positions of a sequence."""
    if f.keeps == 0:
        return 0
    # A window may begin within a page.
    return shared(f, min(-(-int(end) // int(f.page)), -(-(int(f.keeps) - 1 + int(at_once)) // int(f.page)) + 1))


@rule
def shared(f: Any, pages: Any) -> Any:
    """Pages of the pool that so many of a window's take."""
    return -(-pages * int(f.window_bytes) // int(f.kv_bytes))
