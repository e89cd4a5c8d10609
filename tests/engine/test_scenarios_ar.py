"""Autoregressive: P prompt tokens give the first token, then one token a sequence and step."""

from ..worlds import World
from .hand import asked, check_over


def test_each_step_gives_every_sequence_one_token() -> None:
    w = asked(World("ar,page_size=4"), (5, 3), (1, 1))
    w.schedule()
    assert w.features() == (6, 15 + 1, 6, 2, 2, 2, 6, 1)  # causal: 1 + 2 + 3 + 4 + 5
    assert w.commit({0: [0], 1: [0]}) == [1]
    assert w["num_tokens"][:2] == [1, 1]
    w.submit(2, 2, 2)
    w.schedule()
    assert w.plan.prefill
    assert w.features() == (2, 3, 2, 1, 1, 1, 2, 1)
    w.commit({2: [0]})
    w.schedule()
    assert (w.plan.requests.tolist(), w.plan.num_keys.tolist(), w.plan.num_tokens.tolist()) == ([0, 2], [6, 3], [1, 1])
    assert w.features() == (2, 9, 9, 2, 2, 2, 0, 1)
    assert w.commit({0: [0], 2: [0]}) == [2]
    w.schedule()
    assert w.features() == (1, 7, 7, 1, 1, 1, 0, 1)
    assert w.commit({0: [0]}) == [0]
    assert (w["num_tokens"][:3], w["finish"][:3]) == ([3, 1, 2], [4.0, 1.0, 3.0])
    assert w["first_emission"][:3] == [1.0, 1.0, 2.0]
    assert (w["num_forwards"][:3], w["num_committed"][:3]) == ([2, 0, 1], [3, 1, 2])
    check_over(w)


def test_a_request_for_no_tokens_ends_with_its_prefill() -> None:
    w = asked(World("ar"), (5, 0))
    w.schedule()
    assert w.commit() == [0]
    assert (w["num_tokens"][0], w["num_emissions"][0], w.engine.outstanding_tokens) == (0, 0, 0)
    assert w.schedule() == "nothing"


def test_a_preempted_sequence_is_prefilled_with_what_it_had_generated_and_gives_its_next_token() -> None:
    w = asked(World("ar,page_size=2", num_pages=4), (2, 4))  # up to 6 tokens, 3 pages
    w.submit(1, 2, 4)
    w.schedule()
    w.commit({0: [0], 1: [0]})
    w.schedule()  # 3 tokens each: 2 pages each
    w.commit({0: [0], 1: [0]})
    w.schedule()
    w.commit({0: [0], 1: [0]})  # 4 tokens each in the cache
    w.schedule()
    assert (w.plan.preempted, w.plan.requests.tolist(), w.plan.num_keys.tolist()) == ((1,), [0], [5])
    assert w.commit({0: [0]}) == [0]
    w.schedule()
    assert (w.plan.prefill, w.plan.num_tokens.tolist()) == (True, [5])
    assert w.commit({1: [0]}) == [1]
    assert (w["num_tokens"][:2], w["finish"][:2], w["first_block"][:2]) == ([4, 4], [4.0, 5.0], [1.0, 1.0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)
