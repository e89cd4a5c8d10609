"""Pages of layers that attend to a window of tokens.

They hold the step's tokens and those in its first query's window; pages that leave the window are freed when the next
step is planned, as in vLLM's hybrid manager (`remove_skipped_blocks`) with one pool. A page holds `page_size` tokens of
layers without a window; the same tokens of the others take `window_bytes / kv_bytes` of a page. SGLang splits the pool
at the start (`window_pool`).
"""

from .jit import rule
from .state import Fixed


@rule
def in_sight(fixed: Fixed, start: int, end: int) -> int:
    """Pages up to `end` in layers with a window, for a first query at `start`; 0 without windows."""
    if fixed.keeps == 0:
        return 0
    return shared(fixed, -(-int(end) // fixed.page) - num_left(fixed, start))


@rule
def have_room(fixed: Fixed, pages: int, window_pages: int) -> bool:
    """Whether `window_pages` pages of layers with a window and `pages` of others fit, in one pool or two."""
    if fixed.window_pool > 0:
        return bool(pages <= fixed.num_pages - fixed.window_pool and window_pages <= fixed.window_pool)
    return bool(pages + window_pages <= fixed.num_pages)


@rule
def num_left(fixed: Fixed, start: int) -> int:
    """Pages of a sequence before the window of a query at `start`."""
    return max(0, int(start) - fixed.keeps + 1) // fixed.page if fixed.keeps > 0 else 0


@rule
def most_in_sight(fixed: Fixed, end: int, at_once: int) -> int:
    """The largest `in_sight` up to `end`, if a step computes at most `at_once` positions."""
    if fixed.keeps == 0:
        return 0
    # A window may begin within a page.
    return shared(fixed, min(-(-int(end) // fixed.page), -(-(fixed.keeps - 1 + int(at_once)) // fixed.page) + 1))


@rule
def shared(fixed: Fixed, pages: int) -> int:
    """Pages of the pool that `pages` pages of a window take."""
    return -(-pages * fixed.window_bytes // fixed.kv_bytes)
