"""Requests that end at an EOS, beside the same requests that do not: the same tokens, up to and with the first EOS."""

from functools import cache
from itertools import product

import pytest

from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.live.forward import Forward

from .dense import SMALL
from .test_executor import LATENCY, decoder
from .watched import Texts

LENGTHS = [(1, 19), (5, 13), (8, 16), (13, 1), (40, 12), (3, 20), (17, 25), (2, 16), (4, 0)]
EOS = tuple(range(0, SMALL.vocab, 9))
SPECS = [
    "lmdeploy-bd32", "multi-block", "chunk:3", "chunk:3,num_blocks=2", "delayed-cache", "focus",
    "lmdeploy-bd32,num_loops=3", "ar", "ar,decide_ahead=true",
]  # fmt: skip


def run(policy: Policy, eos: tuple[int, ...], emit: str = "block") -> Texts:
    with pytest.MonkeyPatch.context() as patch:
        # The likeliest tokens would all be the same.
        patch.setattr(
            Forward, "_head", lambda _, h: ((h.double().sum(1).abs() * 1e4).long() % SMALL.vocab, h[:, 0].sigmoid())
        )
        how = {"eos": eos, "engine": {"latency": LATENCY, "emit": emit}}
        found = Texts(decoder(), policy, LENGTHS, Limits(200, 256, 4), **how)
    cache = found.forward.cache
    assert cache.num_free + len(cache.table[cache.table >= 0]) == cache.num_pages
    return found


def policy_of(spec: str) -> Policy:
    blocks = "" if spec.startswith("ar") else ",block_length=4"
    return parse(f"{spec},max_batch=4,page_size=8,max_prefill_tokens=24{blocks}")


@cache
def whole(spec: str) -> dict[int, list[int]]:
    """The texts of requests that no EOS ends."""
    return run(policy_of(spec), ()).texts


def expected(policy: Policy, text: list[int], prompt: int, output: int) -> int:
    """Tokens of an answer of `text`, by the rule as it is told."""
    seen = prompt
    if policy.rows.commits == "masks" and prompt % policy.block_length:
        seen = -(-prompt // policy.block_length) * policy.block_length
    ends = [i + 1 - prompt for i in range(seen, prompt + output) if text[i] in EOS]
    return ends[0] if ends else output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "emit"),
    [*((spec, "block") for spec in SPECS), *product(("chunk:3,num_blocks=2", "focus"), ("step", "end"))],
)
def test_a_request_ends_at_its_first_eos_and_its_journal_replays(spec: str, emit: str) -> None:
    policy, texts = policy_of(spec), whole(spec)
    found = run(policy, EOS, emit)
    table, engine = found.done.table, found.done.engine
    wanted = [expected(policy, texts[i], *lengths) for i, lengths in enumerate(LENGTHS)]
    assert table["num_tokens"].tolist() == wanted
    assert sum(n < o for n, (_, o) in zip(wanted, LENGTHS, strict=True)) >= 3
    for i, (prompt, _) in enumerate(LENGTHS):
        assert found.texts[i][: prompt + wanted[i]] == texts[i][: prompt + wanted[i]]
    assert engine.expected_tokens == engine.pages_held == 0
