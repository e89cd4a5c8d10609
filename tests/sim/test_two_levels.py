"""Deciders and scalers from outside, in plain Python and compiled: the same bytes; and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.errors import PolicyError
from dsim.engine.jit import in_python, is_rule
from dsim.engine.numba_parts import JIT
from dsim.engine.policy import parse
from dsim.fleet import Decider, DecodeView, PoolView, ReplicaView, RequestView, Scaler, rule
from dsim.sim.deciders import DECIDERS, Deciding, deciding
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import Scaling, scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.tiers import Tier
from dsim.sim.twin import Result, simulate

from ..worlds import SECOND, Collector, journal_bytes, table_bytes, toy_profile
from .test_ahead import Kept
from .test_split_prefix import FAILS, KV, tree

Run = tuple[Result, Collector | Kept]
EXAMPLES = Path(__file__).parents[2] / "examples" / "fleet"


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


def bytes_of(held: Result | Collector | Kept) -> dict[str, Any]:
    if isinstance(held, Collector):
        return journal_bytes(held)
    if isinstance(held, Kept):
        return {"steps": held.of_replicas()}
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
    files = [EXAMPLES / "decider.py", EXAMPLES / "long_and_short.py"]
    plain, compiled = (deciding(f"{file}:DECIDER,tokens=40", allowed(files)).decider for file in files)
    first = run(plain, False)
    assert 3 < ((first[0].moves or {})["arrived"] > 0).sum() < 77
    for step_by_step in (False, True):
        same(first, run(compiled, step_by_step))


class Peeking(Decider):
    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        return bool(request.output_length > 10)  # type: ignore[attr-defined]


def test_a_decider_sees_no_true_length_of_an_answer() -> None:
    with pytest.raises(PolicyError, match=r"decider mine, asked for request 0: .*no attribute 'output_length'"):
        run(Peeking(), False)


# ---- scalers ------------------------------------------------------------------------------------------------------


@rule
def number(value: float) -> int:
    """A figure as a whole number; NaN: 1."""
    return int(1000 * value) if value == value else 1


@rule
def all_of(pool: Any, place: int, role: int) -> int:
    """Changes with every figure that a scaler may read."""
    counts = pool.ready + 2 * pool.starting + 3 * pool.draining + 5 * pool.waiting + 7 * pool.running + pool.tokens
    counts += pool.pages_held + pool.num_pages + pool.submitted + pool.completed + pool.queued_tokens + 41 * place
    counts += pool.submitted_blocks + pool.waiting_blocks + pool.running_blocks + pool.block_length + pool.page_size
    counts += pool.max_batch + pool.max_prefill + pool.context_limit + pool.gpus + 43 * role
    means = number(pool.input_length) + number(pool.expected_length) + number(pool.output_length) + number(pool.ttft)
    means += number(pool.itl) + number(pool.e2el) + number(pool.hit_rate) + number(pool.tokens_per_forward)
    loads = pool.loads
    for i in range(len(loads.waiting)):
        means += (i + 1) * (number(loads.waiting[i]) + number(loads.queued_tokens[i]) + number(loads.kv_tokens[i]))
        means += (i + 2) * (number(loads.steps[i]) + number(loads.step_time[i]) + number(loads.step_prefill[i]))
        means += (i + 3) * (number(loads.step_kv[i]) + number(loads.step_rows[i]) + number(loads.forwards[i]))
    return int(counts + means)


@rule
def wanted(now: float, pool: Any, memory: Any, settings: Any) -> int:
    memory[0] += all_of(pool, pool.name, pool.role)
    memory[1] += 0.25 * now
    return 1 + int(memory[0] + memory[1]) % settings.most


@dataclass(frozen=True)
class CompiledScaler(Scaler):
    every: float = 3.0
    most: int = 6
    pool_target = wanted
    remembers = 2


@dataclass(frozen=True)
class PlainScaler(Scaler):
    every: float = 3.0
    most: int = 6
    _sums: dict[str, float] = field(default_factory=dict)

    def begin(self) -> Scaler:
        return PlainScaler(self.every, self.most, {})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        plain = in_python(all_of, {})
        for place, pool in enumerate(pools):
            more = plain(pool, place, ("both", "prefill", "decode").index(pool.role))
            self._sums[pool.name] = self._sums.get(pool.name, 0.0) + more + 0.25 * now
        return [1 + int(self._sums[pool.name]) % self.most for pool in pools]


def scaled(scaler: Scaler, step_by_step: bool, how: str) -> Run:
    if how == "split":
        return run(Plain(), step_by_step, scaling=Scaling("mine", scaler))
    own = Setting(parse("vllm-ar,page_size=8,num_pages=90,prefix_caching=true"), toy_profile(latency=SECOND))
    failures = tuple(map(Failure.parse, FAILS)) if how == "failing" else ()
    pools = (Pool(own, 2, startup=Startup.parse("load=2+-1")),)
    fleet = Fleet(pools, routing("jsq"), Scaling("mine", scaler), failures=failures)
    journal = Kept()
    return simulate(tree(3, 80), fleet, append=journal, ordered=False, step_by_step=step_by_step), journal


def scaler_of(spec: str) -> Scaler:
    made = scaling(spec, allowed([spec.partition(":")[0]]))
    assert made is not None
    return made.scaler


@pytest.mark.parametrize("how", ["one pool", "failing", "split"])
def test_a_scaler_scales_alike_at_both_levels(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    plain = scaled(PlainScaler(), False, how)
    assert len({change.ready for change in plain[0].changes}) > 3
    for step_by_step in (False, True):
        same(plain, scaled(CompiledScaler(), step_by_step, how))
        same(plain, scaled(CompiledScaler(), step_by_step, how))  # each run's memory begins at 0
    assert plain[0].changes != scaled(PlainScaler(most=7), False, how)[0].changes


def test_the_example_of_a_scaler_scales_alike_at_both_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    made = scaler_of(f"{EXAMPLES / 'by_trend.py'}:SCALER,tokens=60,every=4")
    first, other = (scaled(made, step_by_step, "one pool") for step_by_step in (False, True))
    same(first, other)
    assert len({change.ready for change in first[0].changes}) > 2


TARGET = """
from dataclasses import dataclass
from dsim.fleet import Scaler, rule

@rule
def enough(now, pool, memory, settings):
    return {answer}

@dataclass(frozen=True)
class Mine(Scaler):
    share: float = 0.5
    {text}
"""


@pytest.mark.parametrize(
    ("answer", "text", "message"),
    [
        ("1", "pool_target = 3", "pool_target is 3, expected a rule (dsim.fleet.rule)"),
        ("1", "pass", "it has neither targets nor pool_target, expected one of them"),
        (
            "1",
            "targets = lambda *asked: [1]\n    pool_target = enough",
            "it has targets and pool_target, expected one of them",
        ),
        (
            "1",
            "pool_target = rule(lambda pool: 1)",
            "pool_target is <lambda>(pool), expected 4 parameters: now, pool, memory",
        ),
        ("1", "pool_target = enough\n    remembers = -1", "remembers is -1, expected 0 to 1048576"),
        ("1", "pool_target = enough\n    remembers = 'two'", "remembers is 'two', expected 0 to 1048576"),
        ("settings.share", "pool_target = enough", "pool_target is answered with float64, expected a whole number"),
        ("pool.ready > 2", "pool_target = enough", "pool_target is answered with bool, expected a whole number"),
        ("pool.nothing", "pool_target = enough", "rule enough cannot be compiled: "),
        ("-1", "pool_target = enough", "returned [-1] at 0 s, expected a number of replicas for each of 1 pools"),
    ],
)
@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_a_scaler_that_cannot_be_asked_is_refused_in_one_line(
    tmp_path: Path, answer: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.engine.two_levels.MANY_REQUESTS", 1)
    path = tmp_path / "mine.py"
    path.write_text(TARGET.format(answer=answer, text=text))
    with pytest.raises(PolicyError) as error:
        scaled(scaler_of(f"{path}:Mine"), False, "one pool")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_rule_may_be_given_as_a_static_method(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        RULE.format(answer="True", text="decision = staticmethod(long)")
        + TARGET.format(answer="1", text="pool_target = staticmethod(enough)").replace("Mine", "Other")
    )
    allow = allowed([path, EXAMPLES / "short_and_empty.py"])
    assert is_rule(type(deciding(f"{path}:Mine", allow).decider).decision)
    assert is_rule(type(scaler_of(f"{path}:Other")).pool_target)
    assert is_rule(routing(f"{EXAMPLES / 'short_and_empty.py'}:ROUTER", allow).kind.load)


# ---- deciders that are refused --------------------------------------------------------------------------------------

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
