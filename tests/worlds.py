"""Small worlds: an engine driven by hand, one driven by a plain loop, and journals collected in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.commits import CanvasLaw, CommitDraws, CommitModel, Commits, ImportanceDeltas, LawDraws, TokenDraws
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import REQUEST_COLUMNS, STEP_COLUMNS, STEP_LISTS, RequestTable
from dsim.engine.latency import LatencyModel
from dsim.engine.prefix import Prefixes
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import PRESETS, Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.profiler.profile import KindError, Profile, load, save
from dsim.sim.setting import Setting
from dsim.sim.step_model import StepModel
from dsim.sim.twin import RunRecords
from dsim.traces import Trace

SECOND = LatencyModel(((0.0, 1.0),), 0.0, layers=2)  # every step takes 1 s
LETTERS = {Phase.PREFILL: "", Phase.DENOISE: "D", Phase.FLUSH: "F", Phase.IDLE: "I"}
WORDS = LETTERS | {Phase.PREFILL: "P"}
CELLS = "MPC"  # masked, pending, cached


NO_WINDOWS: Mapping[str, int] = {}  # of Limits: no layers whose pages are kept for a window alone


def second_profile(folder: Path) -> str:
    """A file of a profile whose every step takes 1 s."""
    profile = load("a100-sdar-8b")
    save(replace(profile, name="second", latency=SECOND), folder / "second.json")
    return str(folder / "second.json")


def refusal(error: Any, call: Callable[..., object], *arguments: Any) -> str:
    """The one line of the error with which a call is refused."""
    with pytest.raises(error) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def doubting(profile: Profile, kind: str) -> Profile:
    """Judged by this kind of steps alone, which it prices 6 to 13 % too fast."""
    error = KindError(kind, 52, median=-0.09, by_time=-0.08, low=-0.131, high=-0.063, p95=0.16, doubted=True)
    return replace(profile, fit=replace(profile.fit, judged_by=(error,)))


class World:
    """An engine fed by hand: every step takes 1 s, and the test says which positions of each row's block commit."""

    def __init__(
        self,
        spec: str | Policy,
        *,
        num_pages: int = 1000,
        max_batch: int = 8,
        context_limit: int = 4096,
        requests: int = 8,
        emit: str = "block",
        latency: LatencyModel = SECOND,
        eos: bool = False,
        windows: Mapping[str, int] = NO_WINDOWS,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.table = RequestTable(requests)
        limits = Limits(num_pages, context_limit, max_batch, **windows)
        policy = parse(spec) if isinstance(spec, str) else spec
        self.engine = Engine(policy, limits, self.table, latency=latency, emit=emit, eos=eos, prefixes=prefixes)
        self.now = 0.0
        self.plan: Any = None  # a StepPlan; None where there is nothing to do

    def submit(
        self, index: int, prompt: int, output: int, max_tokens: int = 0,
    ) -> bool:  # fmt: skip
        return self.engine.submit(Request(index, self.now, prompt, output, max_tokens))

    def schedule(self) -> str:
        """The next step in words: `decode 0D:PPMm 3F:ccPP`, a row's request, phase and cells.

        A cell is its input state, M masked, P pending, C cached; in upper case where the position is computed.
        """
        self.plan = plan = self.engine.schedule(self.now)
        if plan is None:
            return "nothing"
        return " ".join(["prefill" if plan.prefill else "decode", *(_row(plan, i) for i in range(len(plan.requests)))])

    def plan_tokens(self) -> str:
        """The next step in words: `decode 0P3/8 1D1/6`, a row's request, phase, positions computed and keys visible."""
        self.schedule()
        plan = self.plan
        if plan is None:
            return "nothing"
        rows = zip(plan.requests, plan.phases, plan.num_tokens, plan.num_keys, strict=True)
        words = [f"{request}{WORDS[Phase(phase)]}{tokens}/{keys}" for request, phase, tokens, keys in rows]
        return " ".join(["prefill" if plan.prefill else "decode", *words])

    def commit(self, commits: Mapping[int, Iterable[int]] | None = None, retained: Any = None) -> list[int]:
        """End the step in flight with these columns committed, by request; the requests that finished."""
        committed = np.zeros(self.plan.window.shape, np.bool_)
        rows = {int(request): row for row, request in enumerate(self.plan.requests)}
        for request, columns in (commits or {}).items():
            committed[rows[request], list(columns)] = True
        self.now += 1.0
        return sorted(int(i) for i in self.engine.commit(StepOutcome(1.0, committed, retained=retained), self.now))

    def commit_masks(self, num: int | None = None) -> list[int]:
        """End the step in flight with the first masks of each row committed, by default all; as `commit`."""
        masks = self.plan.window & (self.plan.status == 0)
        return self.commit({int(i): np.flatnonzero(masks[row])[:num] for row, i in enumerate(self.plan.requests)})

    def step(self, commits: Mapping[int, Iterable[int]] | None = None) -> str:
        """Schedule and commit; the step in words."""
        text = self.schedule()
        self.commit(commits)
        return text

    def step_tokens(self, commits: Mapping[int, Iterable[int]] | None = None) -> str:
        """Schedule and commit, by default the first column of every window; the step in words."""
        text = self.plan_tokens()
        if self.plan is not None:
            sampled = self.plan.requests[self.plan.window[:, 0]].tolist()
            self.commit({request: [0] for request in sampled} if commits is None else commits)
        return text

    def features(self) -> tuple[int, ...]:
        """tokens, sum_q_kv, sum_kv, head_rows, sampled_rows, batch, prefill_tokens, num_forwards of the last plan."""
        return tuple(int(v) for v in self.plan.features[:8])  # toy models have no layers with a window

    def __getitem__(self, column: str) -> list[Any]:
        return self.table[column].tolist()


def asked(world: Any, *lengths: tuple[int, int]) -> Any:
    """The World or Served, in which requests of these input and output lengths wait."""
    for index, (prompt, output) in enumerate(lengths):
        world.submit(index, prompt, output)
    return world


def check_over(world: Any) -> None:
    """Nothing is left to do, and nothing is held."""
    assert world.schedule() == "nothing"
    assert (world.engine.pages_held, world.engine.expected_tokens) == (0, 0)


def _row(plan: StepPlan, i: int) -> str:
    cells = zip(plan.status[i].tolist(), plan.window[i].tolist(), strict=True)
    text = "".join(CELLS[s] if computed else CELLS[s].lower() for s, computed in cells)
    return f"{plan.requests[i]}{LETTERS[Phase(plan.phases[i])]}:{text}"


def plan_of(**known: Any) -> StepPlan:
    """A plan with these fields and None for the rest."""
    known.setdefault("prompt", np.zeros(len(known["requests"]), np.int32))
    rest = {f.name: None for f in fields(StepPlan) if f.name not in known}
    return StepPlan(**known, **rest)  # type: ignore[arg-type]


TOY_MODEL = CommitModel(
    "toy", 4, 0.9, None, (0.8, 0.5, 0.3, 0.2), request_spread=0.7, block_spread=0.5, step_spread=0.4, stage_gain=1.0,
    padding_share=0.2,
)  # fmt: skip


TOY_LAW = CanvasLaw("toy", 4, 3.0, request_spread=0.3, canvas_spread=0.4, drift=1.2, most=9)

# Policies for block-diffusion and autoregressive models, which every profile but a full-sequence model's can run.
BLOCK_PRESETS = [
    name
    for name, preset in PRESETS.items()
    if not (preset.policy.family == "full-sequence" or preset.policy.batching.pieces)
]
# Those that prefill a prompt over several steps, whose fields go by the names of their engines; some commit by a law.
ENGINE_PRESETS = [name for name, preset in PRESETS.items() if preset.policy.batching.pieces]

TOY_DELTAS = ImportanceDeltas(1.5, 1.0, 0.0, 0.8, 0.1)


def toy_profile(commits: CommitModel = TOY_MODEL, latency: LatencyModel | None = None) -> Profile:
    """A shipped profile with another latency, commit model and law: 1 s a step, and 1 ms a token."""
    latency = latency or LatencyModel(((0.0, 1.0),), 0.001)
    return replace(load("a100-sdar-8b"), latency=latency, commits=(commits,), focus=TOY_DELTAS, canvas_laws=(TOY_LAW,))


def toy_trace(arrival: Iterable[float], prompts: Iterable[int], outputs: Iterable[int]) -> Trace:
    return Trace("toy", np.array(list(arrival), float), np.array(list(prompts)), np.array(list(outputs)))


@dataclass
class Collector:
    """A journal in memory: what `simulate(..., append=collector)` hands on."""

    parts: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    list_parts: list[dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = field(default_factory=list)

    def __call__(self, columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        self.parts.append(dict(columns))
        self.list_parts.append(dict(lists))

    @property
    def steps(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}

    @property
    def lists(self) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        out = {}
        for name in STEP_LISTS:
            values = np.concatenate([part[name][0] for part in self.list_parts])
            lengths = np.concatenate([np.diff(part[name][1]) for part in self.list_parts])
            out[name] = (values, np.concatenate([[0], np.cumsum(lengths)]))
        return out


def table_bytes(table: RequestTable) -> dict[str, bytes]:
    return {name: table[name].tobytes() for name in REQUEST_COLUMNS}


def journal_bytes(journal: Collector) -> dict[str, bytes]:
    steps, lists = journal.steps, journal.lists
    out = {f"step {name}": steps[name].tobytes() for name in STEP_COLUMNS}
    return out | {f"list {name}": b"".join(part.tobytes() for part in lists[name]) for name in STEP_LISTS}


def differences(setting: Setting, result: RunRecords, journal: Collector, **how: Any) -> list[str]:
    """What fresh engines, one a replica, say of a run's journal and table, and of pages held at the end.

    how: of the engines; `on_step` hears each step.
    """
    columns, steps = result.table.columns, journal.steps
    hears = {"on_step": how.pop("on_step")} if "on_step" in how else {}
    found: list[str] = []
    table = RequestTable(len(result.table.rows))
    for replica in sorted({*columns["replica"].tolist(), *steps["replica"].tolist()}):
        engine = setting.engine(table, replica=replica, limits=result.limits, **how)
        found += replay(engine, replica, columns, steps, journal.lists, **hears)
        found += [f"replica {replica} holds {engine.pages_held} pages"] if engine.pages_held else []
    assert found or table_bytes(table) == table_bytes(result.table)
    return found


class PlainLoop(ABC):
    """The plainest driver there is: a loop, no SimPy. `_check` says what must hold at every step."""

    def __init__(self, engine: Engine, step_model: StepModel, trace: Trace) -> None:
        self.engine, self.step_model, self.trace = engine, step_model, trace
        self.policy, self.limits, self.table = engine.policy, engine.limits, engine.table
        self.committed: list[set[int]] = [set() for _ in range(len(trace))]
        self.plans: list[StepPlan] = []
        self.ended: list[int] = []
        self._pages_ahead: npt.NDArray[np.int32] | None = None  # of each slot, as the next step was decided on ahead

    def run(self) -> Self:
        engine, trace = self.engine, self.trace
        now, next_request = 0.0, 0
        while True:
            while next_request < len(trace) and trace.arrival[next_request] <= now:
                if not engine.submit(trace.request(next_request)):
                    self.ended.append(next_request)
                next_request += 1
            plan = engine.schedule(now)
            if plan is None:
                assert engine.idle
                if next_request == len(trace):
                    return self
                now = float(trace.arrival[next_request])
                continue
            outcome = self.step_model.step(plan)
            self.plans.append(plan)
            assert len(self.plans) < 100_000
            assert (trace.arrival[plan.requests] <= plan.now).all()
            assert len(set(plan.requests.tolist())) == len(plan.requests) == plan.features.batch
            self._check(plan, outcome)
            now = plan.now + outcome.latency
            self.ended.extend(int(i) for i in engine.commit(outcome, now))
            assert 0 <= engine.pages_held <= self.limits.num_pages
            assert engine.expected_tokens >= 0
            assert engine.num_waiting + engine.num_running == next_request - len(self.ended)
            assert len(set(self.ended)) == len(self.ended)

    @abstractmethod
    def _check(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """What holds of a step of such a policy."""

    def _check_pages_ahead(self, plan: StepPlan) -> None:
        """A step decided on ahead has the pages of all its keys from then on."""
        engine = self.engine
        if self._pages_ahead is not None:
            assert (plan.num_keys <= self._pages_ahead[plan.slots] * self.policy.memory.page_size).all()
        self._pages_ahead = engine._arrays.sequences["pages"].copy() if engine._counters["next_kind"] else None

    def _check_commits(self, plan: StepPlan, outcome: StepOutcome) -> None:
        masks = plan.window & (plan.status == 0)
        assert not (outcome.committed & ~masks).any()
        assert (outcome.committed.any(axis=1) == masks.any(axis=1)).all()
        for row, request in enumerate(plan.requests.tolist()):
            where = {int(plan.block_start[row]) + int(p) for p in np.flatnonzero(outcome.committed[row])}
            assert not where & self.committed[request], "a position is committed once"
            self.committed[request] |= where


def draws_of(policy: Policy, trace: Trace, seed: int, model: CommitModel = TOY_MODEL) -> Commits | None:
    """What a toy model commits of a trace."""
    if policy.rows.commits == "tokens":
        return TokenDraws(policy.granularity.acceptances, seed) if policy.width > 1 else None
    if policy.unmasking.strategy == "law":
        return LawDraws(TOY_LAW, seed, len(trace))
    model = model.for_block(policy.block_length)
    return CommitDraws(
        model,
        seed,
        trace.input_length,
        trace.output_length,
        policy.width,
        deltas=TOY_DELTAS,
        ahead=policy.granularity.ahead_of,
    )


class Driver(PlainLoop):
    """A block-diffusion or autoregressive policy's plain loop."""

    def __init__(
        self,
        policy: Policy,
        trace: Trace,
        *,
        num_pages: int,
        max_batch: int,
        model: CommitModel = TOY_MODEL,
        latency: LatencyModel = SECOND,
        seed: int = 0,
        emit: str = "block",
        eos: bool = False,
        windows: Mapping[str, int] = NO_WINDOWS,
    ) -> None:
        limits = Limits(num_pages, 4096, max_batch, **windows)
        engine = Engine(policy, limits, RequestTable(len(trace)), latency=latency, emit=emit, eos=eos)
        draws = draws_of(policy, trace, seed, model)
        super().__init__(engine, StepModel(latency, draws, hides_host=policy.batching.hides_host), trace)

    def _check(self, plan: StepPlan, outcome: StepOutcome) -> None:
        live = plan.phases != Phase.IDLE  # the others are computed for nothing: their requests have ended
        assert live.any() <= plan.pages <= self.limits.num_pages
        assert plan.running <= self.limits.max_batch
        page = self.policy.memory.page_size
        # Every position computed lies on a page that is held, but where the next step has been given it already.
        width = np.arange(plan.window.shape[1]) + 1
        last = plan.block_start + np.where(plan.window, width, 0).max(axis=1)
        last = np.where(plan.phases == Phase.PREFILL, plan.num_keys, last)  # a chunk ends before its last block
        assert -(-last // page)[live & ~np.isin(plan.requests, plan.preempted)].sum() <= plan.pages
        self._check_pages_ahead(plan)
        if plan.prefill:
            assert plan.num_tokens.sum() == plan.features.tokens == plan.features.prefill_tokens
        assert not set(plan.requests[live].tolist()) & set(self.ended)
        if self.policy.rows.commits == "tokens":
            return
        self._check_commits(plan, outcome)
