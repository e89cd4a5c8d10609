"""A discipline on SGLang's scheduler, around a stand-in with the names and the order of work of SGLang 0.5.23's."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.errors import PolicyError
from dsim.engine.spec import parse
from dsim.engine.view import class_of

pytest.importorskip("torch")

from ..checks import cases
from ..worlds import World, asked
from .test_hooks import Bag, Hook, hook, lines_of, modules, sglang_scheduler
from .test_vllm_policy import FILE

__all__ = ["hook"]

LATE = """
LATE = Policy("late", Continuous(num_loops=1), discipline=answering(order=lambda view: 1 // (view.num_waiting - 3)))
"""
Served = Callable[..., Any]


@pytest.fixture
def served(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A scheduler under a policy of FILE; `fetch` returns the requests that run after a round's choice."""
    hooks: dict[str, Any] = {}
    registry = Bag(register=lambda target, around, kind: hooks.update({target.rpartition(".")[2]: around}))
    names = {"HookRegistry": registry, "HookType": Bag(AROUND="around")}
    modules(monkeypatch, sglang={"__version__": "0.5.23"}, sglang__srt__plugins__hook_registry=names)
    (tmp_path / "mine.py").write_text(FILE + LATE)

    def build(spec: str, algorithm: str = "LowConfidence", **settings: Any) -> Any:
        monkeypatch.setenv("DSIM_POLICY", spec.replace("FILE", f"{tmp_path}/mine.py"))
        s = sglang_scheduler(algorithm, True, 2)
        s.schedule_policy, s.tree_cache = "fcfs", Bag(evictable_size=lambda: 40)
        s.token_to_kv_pool_allocator = Bag(available_size=lambda: 340)
        vars(s).update(settings)
        hook("sglang").register()
        hooks["init_schedule_policy"](lambda s: setattr(s, "policy", Bag(priority_sign=-1)), s)

        def fetch() -> list[str]:
            hooks["calc_priority"](lambda *a: None, s.policy, s.waiting_queue)
            running = s.dllm_manager.waiting_queue
            while s.waiting_queue and len(running) < 2:
                running.append(s.waiting_queue.pop(0))
            return [request.rid for request in running]

        s.fetch, s.receive = fetch, hooks["handle_generate_request"]
        return s

    return build


def add(scheduler: Any, name: str, prompt: int, output: int, priority: int | None = None, **extra: Any) -> None:
    params = Bag(max_new_tokens=output, custom_params=extra or None)
    scheduler.receive(lambda *a: None, scheduler, Bag(rid=name, input_ids=[0] * prompt, sampling_params=params))
    request = Bag(rid=name, origin_input_ids=[0] * prompt, output_ids=[], priority=priority, sampling_params=params)
    request.time_stats = Bag(wait_queue_entry_time=100.0)
    scheduler.waiting_queue.append(request)


def test_a_discipline_orders_sglangs_queue_and_sees_what_requests_state(
    served: Served, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = served("sglang-fdfo,discipline=FILE:ORDER")
    monkeypatch.setattr("time.perf_counter", lambda: 103.0)
    add(s, "a", 2, 9, priority=3, deadline=7, slo_class="chat")
    add(s, "b", 2, 3)
    add(s, "c", 2, 99, estimated_length="6")
    assert s.fetch() == ["b", "c"]
    state = hook("sglang")._STATE
    state["log"].close()
    assert lines_of(tmp_path)[0]["settings"]["policy"] == f"sglang-fdfo,discipline={tmp_path}/mine.py:ORDER"
    (view,) = state["asker"].policy.discipline.order.__globals__["VIEWS"]
    assert (view.now, view.num_waiting, view.num_running, view.pages_held, view.num_pages) == (103.0, 3, 0, 5, 100)
    assert (view.fields.max_running_requests, view.fields.block_length, view.fields.threshold) == (2, 4, 0.9)
    waiting = view.waiting()
    assert (waiting.deadline.tolist(), waiting.priority.tolist()) == ([107.0, math.inf, math.inf], [-3, 0, 0])
    assert (waiting.slo_class[0], waiting.age[0], waiting.estimate.tolist()) == (class_of("chat"), 3, [9, 3, 6])


def test_a_policy_that_fails_is_logged_once_and_sglangs_own_order_goes_on(
    served: Served, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    s = served("FILE:LATE")
    for name in "abc":
        add(s, name, 2, 9, deadline="soon")
    assert [s.fetch(), s.fetch()] == [["a", "b"]] * 2
    assert hook("sglang")._STATE["asker"].num_errors == 3 + 1  # three deadlines, and the first round; then one waits
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "failed, and SGLang's own rule decides: could not convert string to float: 'soon'" in line


@cases(
    "spec settings says",
    ("sglang-fdfo,discipline=FILE:HOLDS", {}, "Mine answers holds, and Rounds asks only order"),
    ("vllm-ar,discipline=FILE:ORDER", {}, "batching is TokenBudget, which SGLang does not do"),
    ("FILE:LATE", {"tp_size": 2}, "SGLang's --tp-size is 2, expected 1: ranks' clocks differ"),
    ("FILE:LATE", {"schedule_policy": "lpm"}, "SGLang's --schedule-policy is lpm, expected fcfs"),
    ("FILE:LATE", {"dllm_config": None}, "dsim has no preset of what SGLang serves here"),
    ("sglang-sync,discipline=FILE:LATE,dllm_fdfo=false", {}, "dllm_fdfo is False, and SGLang serves with True"),
)
def test_what_sglang_cannot_honour_is_refused_by_name(
    served: Served, spec: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        served(spec, **settings)


@pytest.mark.parametrize(
    ("preset", "algorithm"),
    [("sglang-fdfo", "LowConfidence"), ("sglang-joint", "JointThreshold"), ("sglang-gemma", "Gemma4Renoise")],
)
def test_the_twin_admits_in_the_order_of_the_engine(
    served: Served, tmp_path: Path, preset: str, algorithm: str
) -> None:
    spec, lengths = f"{preset},discipline=FILE:ORDER", [(4, 9), (4, 3), (4, 6)]
    engine = served(spec, algorithm)
    for i, (prompt, output) in enumerate(lengths):
        add(engine, str(i), prompt, output)
    file = f"{tmp_path}/mine.py"
    twin = asked(World(parse(spec.replace("FILE", file), allowed([file])), max_batch=2), *lengths)
    twin.schedule()
    assert [str(i) for i in twin.plan.requests] == engine.fetch() == ["1", "2"]
