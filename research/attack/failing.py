"""An executor and a journal that fail at their n-th call, for every n: nothing hangs, and what was journalled stays."""

import asyncio
import errno
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from dsim.engine.errors import MachineError
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.spec import parse
from dsim.live.device_loop import serve
from dsim.results.run import read_run
from dsim.results.run_folder import RunWriter
from dsim.results.world import World
from dsim.serve.open import open_twin
from dsim.serve.served import RefusedError
from dsim.sim.setting import Setting
from dsim.traces import Trace

from ...tests.worlds import toy_trace
from .commands import run_command

Attack = Callable[[Random, Path], None]
PATIENCE = 30.0  # s of the clock: a reply that takes longer hangs
POLICIES = ("ar", "lmdeploy-bd32", "chunk:8", "optimus", "focus", "lmdeploy-0.18", "delayed-cache")


def of_failures() -> dict[str, Attack]:
    """By name: what fails, and where."""
    found: dict[str, Attack] = {"failures: live loop": live_loop, "failures: served": served}
    if find_spec("torch") is not None:
        found["failures: live"] = live
    return found


class FailsAt:
    """Calls through to what it stands for, and fails at the n-th call and after; `calls` are those that went well."""

    def __init__(self, n: int, call: Callable[..., Any], error: Exception) -> None:
        self.n = n
        self.calls = 0
        self.failed = False
        self._call = call
        self._error = error

    def __call__(self, *of: Any) -> Any:
        if self.failed or self.calls + 1 == self.n:
            self.failed = True
            raise self._error
        done = self._call(*of)
        self.calls += 1
        return done

    step = __call__


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _traffic(chance: Random) -> Trace:
    at, times = 0.0, []
    for _ in range(chance.randint(2, 6)):
        times.append(at)
        at += chance.choice((0.0, 0.0, 0.5, 3.0))
    return toy_trace(times, [chance.randint(1, 90) for _ in times], [chance.choice((1, 20, 33, 64)) for _ in times])


class _Clock:
    """Time that passes in `sleep`, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0**-10
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 2.0**-10)


def live_loop(chance: Random, folder: Path) -> None:
    """The live loop with the twin's steps on a clock of its own."""
    spec = f"{chance.choice(POLICIES)},max_batch=3"
    trace, ahead = _traffic(chance), chance.random() < 0.5
    requests = [trace.request(i) for i in range(len(trace))]
    world = World("azure-conv", spec)
    profile, policy = world.loaded_profile(), parse(spec)
    setting = Setting(policy, profile)

    def run(executor_fails: int, journal_fails: int) -> tuple[FailsAt, FailsAt, list[int], Exception | None]:
        table = RequestTable(len(requests))
        engine = setting.engine(table)
        model = setting.step_model(setting.draws(0, trace))
        kept: list[int] = []
        sink = FailsAt(journal_fails, lambda columns, lists: kept.extend(columns["step"].tolist()), _full())
        executor = FailsAt(executor_fails, model.step, MachineError("the device is lost"))
        meanwhile: list[Callable[[], object]] | None = [] if ahead else None
        if meanwhile is not None:
            step, calls = executor.step, meanwhile

            def stepped(plan: Any) -> Any:
                for call in list(calls):
                    call()
                return step(plan)

            executor.step = stepped  # type: ignore[method-assign]
        recorder, clock = StepRecorder(sink, policy.width, 1), _Clock()
        try:
            serve(engine, executor, requests, recorder=recorder, clock=clock, sleep=clock.sleep, meanwhile=meanwhile)
            recorder.flush()
        except Exception as error:
            if not sink.failed:
                recorder.flush()
            return executor, sink, kept, error
        return executor, sink, kept, None

    executor, _, kept, error = run(0, 0)
    assert error is None, error
    num = executor.calls
    assert kept == list(range(num)), "the journal lacks a step"
    for n in _each(chance, num):
        executor, _, kept, error = run(n, 0)
        assert isinstance(error, MachineError), f"step {n} failed, and {error!r} came of it"
        assert kept == list(range(n - 1)), f"step {n} failed, and the journal holds {len(kept)} of {n - 1}"
        _, _, kept, error = run(0, n)
        assert isinstance(error, OSError), f"batch {n} failed, and {error!r} came of it"
        assert kept == list(range(n - 1)), f"batch {n} failed, and the journal holds {len(kept)} of {n - 1}"


def _each(chance: Random, num: int, most: int = 40) -> list[int]:
    """Every call; of many, some that are drawn."""
    return list(range(1, num + 1)) if num <= most else sorted(chance.sample(range(1, num + 1), most))


def served(chance: Random, folder: Path) -> None:
    """A server's replicas: every client hears of the end, and none is taken in after it."""
    world = World("", f"{chance.choice(POLICIES)},max_batch=3", replicas=chance.choice((1, 1, 2)))
    asked = [(chance.randint(1, 60), chance.choice((1, 20, 33))) for _ in range(chance.randint(1, 4))]

    def run(executor_fails: int, journal_fails: int) -> tuple[int, FailsAt, list[str]]:
        kept: list[int] = []
        sink = FailsAt(journal_fails, lambda columns, lists: kept.extend(columns["step"].tolist()), _full())
        with mock.patch("dsim.serve.served.StepRecorder", lambda append, width, batch: StepRecorder(append, width, 1)):
            behind = open_twin(world, speed=1e6, append=sink)
            steps = [
                FailsAt(executor_fails, each.step, MachineError("the device is lost")) for each in behind.executors
            ]
            ends = asyncio.run(_clients(replace(behind, executors=steps), asked))
        assert sink.calls == len(kept)
        if not journal_fails:
            assert len(kept) == sum(step.calls for step in steps), "the journal lacks a step"
        return sum(step.calls for step in steps), sink, ends

    num, _, ends = run(0, 0)
    assert set(ends) == {"whole"}, ends
    for n in _each(chance, num, 3):
        _, _, ends = run(n, 0)
        assert "lost" not in ends, ends
        calls, sink, ends = run(0, n)
        assert not {"lost", "short"} & set(ends), f"batch {n} of the journal failed, and replies ended {ends}"
        assert sink.failed or set(ends) == {"whole"}, ends
        assert sink.calls == min(n - 1, calls)


async def _clients(behind: Any, asked: list[tuple[int, int]]) -> list[str]:
    """How each client's reply ended, and that of one who came after."""
    behind.start()
    try:
        streams = [_submit(behind, *lengths) for lengths in asked]
        ends = [await _end(stream) for stream in streams]
        late = _submit(behind, 4, 4)
        assert late or any(replica.failure for replica in behind.fleet.replicas), "nothing failed, and none is accepted"
        return ends if late is None else [*ends, await _end(late)]
    finally:
        await asyncio.to_thread(behind.fleet.stop)


def _submit(behind: Any, prompt: int, output: int) -> Any:
    try:
        return behind.fleet.submit([0] * prompt, output)
    except RefusedError:
        return None


async def _end(stream: Any) -> str:
    if stream is None:
        return "refused"
    num = 0
    while True:
        try:
            emission = await asyncio.wait_for(stream.emissions.get(), PATIENCE)
        except TimeoutError:
            return "lost"
        if emission is None or isinstance(emission, str):
            return "told"
        num += len(emission.tokens)
        if emission.last:
            return "whole" if num == stream.output_length else "short"


LIVE = ("live", "trace.jsonl", "--model", "tiny", "--lengths", "fixed:8,8", "--device", "cpu")
TINY = "lmdeploy-bd32:4,max_batch=4,page_size=8"


def live(chance: Random, folder: Path) -> None:
    """`dsim live -o`: one line, exit code 1, and a run that holds what was journalled."""
    rows = [{"timestamp": 10 * i, "input_length": 8, "output_length": 8} for i in range(chance.randint(1, 3))]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    what, n = chance.choice(("journal", "executor")), chance.randint(1, 9)
    from dsim.live import session

    steps: list[FailsAt] = []
    opened = session.Serving.executor

    def opens(*of: Any) -> Any:
        executor = opened(*of)
        # The first is the run's; the next one warms it up.
        fails = n if what == "executor" and not steps else 0
        steps.append(FailsAt(fails, executor.step, MachineError("the device is lost")))
        executor.step = steps[-1]  # type: ignore[method-assign, assignment]
        return executor

    sink = FailsAt(n if what == "journal" else 0, RunWriter.append, _full())
    with (
        mock.patch.object(session.Serving, "executor", opens), mock.patch.object(session, "BATCH", 1),
        mock.patch.object(RunWriter, "append", lambda *of: sink(*of)),
    ):  # fmt: skip
        code, _, said = run_command([*LIVE, "--policy", TINY, "-o", "out"], folder)
    failed = sink.failed or steps[0].failed
    assert code == failed, said
    assert "Traceback" not in said, said
    assert not failed or said.splitlines()[-1].startswith("Error: "), said
    assert (folder / "out").is_dir(), f"{what}, call {n}: the run is not kept: {said}"
    held = read_run(folder / "out")
    assert held.num_steps == sink.calls, f"{what}, call {n}: {held.num_steps} of {sink.calls} steps are kept"
    assert what == "journal" or sink.calls == steps[0].calls, "the journal lacks a step"
