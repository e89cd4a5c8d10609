"""Deciders and scalers from outside, in plain Python and compiled: the same bytes; and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.errors import PolicyError
from dsim.engine.numba_parts import JIT
from dsim.engine.policy import parse
from dsim.fleet import Decider, DecodeView, ReplicaView, RequestView, rule
from dsim.sim.deciders import DECIDERS, Deciding, deciding
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.tiers import Tier
from dsim.sim.twin import Result, simulate

from ..worlds import SECOND, Collector, journal_bytes, table_bytes, toy_profile
from .test_split_prefix import FAILS, KV, tree

Run = tuple[Result, Collector]


@rule
def load_of(replica: Any) -> int:
    figures = replica.num_waiting + 2 * replica.num_running + 3 * replica.expected_tokens + 5 * replica.pages_held
    more = 7 * replica.queued_prompt_tokens + 11 * replica.num_pages + 13 * replica.page_size
    return int(figures + more + 17 * replica.replica)


@rule
def mixed(request: Any, prefill: Any, decode: Any, settings: Any) -> bool:
    """Changes with every figure that a decider may read."""
    total = request.index + int(100 * request.arrival) + request.input_length + request.expected + request.priority
    for k in range(len(prefill)):
        total += (k + 1) * load_of(prefill[k])
    for k in range(len(decode)):
        total += (k + 2) * load_of(decode[k]) + 19 * decode[k].found
    return total % settings.modulus != 0 and total * settings.share < 1e12 and request.deadline > 0


@dataclass(frozen=True)
class Compiled(Decider):
    modulus: int = 5
    share: float = 0.5
    decision = mixed


@dataclass(frozen=True)
class Plain(Decider):
    modulus: int = 5
    share: float = 0.5

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        total = request.index + int(100 * request.arrival) + request.input_length + request.expected + request.priority
        total += sum((k + 1) * load_of.py_func(replica) for k, replica in enumerate(prefill))  # type: ignore[attr-defined]
        for k, replica in enumerate(decode):
            total += (k + 2) * load_of.py_func(replica) + 19 * replica.found(request)  # type: ignore[attr-defined]
        return total % self.modulus != 0 and total * self.share < 1e12 and request.deadline > 0


HOWS: dict[str, dict[str, Any]] = {
    "prefixes": {},
    "crowded": {"pages": 40},
    "failing": {"pages": 60, "failures": tuple(map(Failure.parse, FAILS))},
    # Up to 20 replicas: the board that they share grows.
    "scaling": {"reserve": "early", "scaling": scaling("schedule,at=0/1+2/5/8+12/15/3+1/25/2+2,every=5")},
    "tiers": {"pages": 30, "tiers": (Tier("host", 1e9, 1e7, 12.0),)},
}


def run(decider: Decider, step_by_step: bool, pages: int = 400, reserve: str = "late", **how: Any) -> Run:
    spec = f"vllm-ar,page_size=8,num_pages={pages}"
    settings = [Setting(parse(f"{spec}{more}"), toy_profile(latency=SECOND)) for more in ("", ",prefix_caching=true")]
    pools = tuple(
        Pool(own, count, name, Startup.parse("load=2+-1"))
        for own, count, name in zip(settings, (1, 2), "pd", strict=True)
    )
    link = Link(KV * 300.0, 0.01, reserve=reserve)
    fleet = Fleet(pools, routing("least-tokens"), links=(link,), deciding=Deciding("mine", decider), **how)
    journal = Collector()
    return simulate(tree(3, 80), fleet, append=journal, step_by_step=step_by_step), journal


def same(first: Run, other: Run) -> None:
    # Not compared as wholes: pytest would take minutes for the difference of two journals.
    for mine, theirs in zip(map(bytes_of, first), map(bytes_of, other), strict=True):
        different = [name for name in mine if mine[name] != theirs[name]]
        assert different == []
    assert first[0].changes == other[0].changes


def bytes_of(held: Result | Collector) -> dict[str, bytes]:
    if isinstance(held, Collector):
        return journal_bytes(held)
    return table_bytes(held.table) | {name: column.tobytes() for name, column in (held.moves or {}).items()}


@pytest.mark.parametrize("name", HOWS)
def test_a_decider_decides_alike_at_both_levels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    plain = run(Plain(), False, **HOWS[name])
    moved = (plain[0].moves or {})["arrived"] > 0
    assert 3 < moved.sum() < 77
    for step_by_step in (False, True):
        same(plain, run(Compiled(), step_by_step, **HOWS[name]))
    assert (run(Plain(modulus=2), False, **HOWS[name])[0].moves or {})["arrived"].tolist() != moved.tolist()


def test_the_example_decides_alike_at_both_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    folder = Path(__file__).parents[2] / "examples" / "fleet"
    files = [folder / "decider.py", folder / "long_and_short.py"]
    plain, compiled = (deciding(f"{file}:DECIDER,tokens=40", allowed(files)).decider for file in files)
    first = run(plain, False)
    assert 3 < ((first[0].moves or {})["arrived"] > 0).sum() < 77
    for step_by_step in (False, True):
        same(first, run(compiled, step_by_step))


RULE = """
from dataclasses import dataclass
from dsim.fleet import Decider, rule

@rule
def long(request, prefill, decode, settings):
    return {answer}

@dataclass(frozen=True)
class Mine(Decider):
    tokens: int = 10
    {text}
"""
DECISION = "decision = long"


@pytest.mark.parametrize(
    ("answer", "text", "message"),
    [
        ("True", "decision = 3", "decision is 3, expected a rule (dsim.fleet.rule)"),
        ("True", "pass", "it has neither splits nor decision, expected one of them"),
        ("True", f"splits = lambda *asked: True\n    {DECISION}", "it has splits and decision, expected one of them"),
        (
            "True",
            "decision = rule(lambda request, prefill: True)",
            "decision is <lambda>(request, prefill), expected 4 parameters: request, prefill, decode, settings",
        ),
        ("request.input_length", DECISION, "decision is answered with int64, expected true or false"),
        ("request.output_length > 3", DECISION, "rule long cannot be compiled: "),
        ("settings.none_such > 3", DECISION, "rule long cannot be compiled: "),
        ("decode.num_waiting.nothing > 3", DECISION, "rule long cannot be compiled: "),
    ],
)
@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_a_decider_that_cannot_be_asked_is_refused_in_one_line(
    tmp_path: Path, answer: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    path = tmp_path / "mine.py"
    path.write_text(RULE.format(answer=answer, text=text))
    with pytest.raises(PolicyError) as error:
        run(deciding(f"{path}:Mine,tokens=30", allowed([path])).decider, False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("answer", ["request.input_length", "request.output_length > 3"])
def test_a_decider_s_rule_is_checked_in_plain_python_too(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RULE.format(answer=answer, text=DECISION))
    with pytest.raises(PolicyError, match=r"decider mine, asked for request 0: (TypeError|AttributeError)"):
        run(deciding(f"{path}:Mine", allowed([path])).decider, True)


def test_shipped_deciders_have_one_level() -> None:
    for name in DECIDERS:
        assert deciding(name).is_shipped
