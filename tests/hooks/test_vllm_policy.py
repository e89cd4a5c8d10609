"""A discipline on vLLM's scheduler, around a stand-in with the names and the order of work of vLLM 0.32's."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.policy_in_vllm.cost import Scheduler as StandIn
from dsim.benchmarks.policy_in_vllm.cost import config_of, modules_of
from dsim.engine.errors import PolicyError
from dsim.engine.view import class_of
from dsim.profiler.steplog import read_log

pytest.importorskip("torch")
import torch

from ..checks import cases
from .test_hooks import Bag, Hook, hook, modules

__all__ = ["hook"]

FILE = """
from dataclasses import dataclass
import numpy as np
from dsim.policy import Continuous, DelayedCache, Discipline, Policy
VIEWS = []
def answering(**methods):
    named = {name: lambda self, view, method=method: method(view) for name, method in methods.items()}
    return dataclass(frozen=True)(type("Mine", (Discipline,), named))()
def shortest(view):
    VIEWS.append(view)
    return np.argsort(view.waiting().estimate, kind="stable")
ORDER = answering(order=shortest)
HOLDS = answering(order=shortest, holds=lambda view: view.waiting().prompt == 3)
ONE = answering(most_admitted=lambda view: 1)
PROMPTS = answering(most_prompt_tokens=lambda view: 3, rests=lambda view: view.running().index == 0)
STEPS = answering(steps=lambda view: np.full(view.num_waiting, 5), steps_now=lambda view: view.running().emitted + 3)
BROKEN = answering(order=lambda view: 1 // (view.num_waiting - 3), holds=lambda view: [True])
LONE = Policy("lone", Continuous(num_loops=1), discipline=ORDER)
DELAYED = Policy("delayed", eviction=DelayedCache())
"""


class Scheduler(StandIn):
    """A token budget; running rows first, then the queue's head, until one of them finds no room."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.max_num_active_reqs, self.max_num_scheduled_tokens = 4, 16

    def has_requests(self) -> bool:
        return True

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return not request.blocked

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.current_step += 1
        budget, rows, skipped = self.max_num_scheduled_tokens, {}, []
        for request in self.running:
            if self.current_step >= request.next_decode_eligible_step and budget:
                rows[request.request_id] = n = min(
                    budget, max(1, request.num_prompt_tokens - request.num_computed_tokens)
                )
                budget -= n
        while self.waiting and budget and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.popleft()
            if not self._handle_blocked_waiting_request(request):
                skipped.append(request)
                continue
            self.running.append(request)
            rows[request.request_id] = n = min(budget, request.num_prompt_tokens)
            budget -= n
        self.waiting.extendleft(reversed(skipped))
        for request in self.running:
            request.num_computed_tokens += rows.get(request.request_id, 0)
            request.is_prefill_chunk = request.num_computed_tokens < request.num_prompt_tokens
        total = sum(rows.values())
        return Bag(num_scheduled_tokens=rows, total_num_scheduled_tokens=total, scheduled_spec_decode_tokens={})

    def update_from_output(self, output: Any, model_output: Any) -> Any:
        return {}


class Async(Scheduler):
    """Schedules a step ahead."""


@pytest.fixture
def scheduler(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A scheduler under a policy of FILE, and its configuration."""
    named = modules_of(Scheduler, Async)
    modules(monkeypatch, **{name.replace(".", "__"): values for name, values in named.items()})
    (tmp_path / "mine.py").write_text(FILE)

    def build(spec: str, canvases: bool = False, **settings: Any) -> Any:
        usual = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "async_scheduling": False}
        config = config_of(spec.replace("FILE", f"{tmp_path}/mine.py"), canvases, **usual | settings)
        scheduler = hook("vllm").policy_scheduler(config)
        scheduler.config = config
        return scheduler

    return build


def add(scheduler: Any, name: str, prompt: int, output: int, blocked: bool = False, **extra: Any) -> Any:
    request = Bag(
        request_id=name, num_prompt_tokens=prompt, max_tokens=output, sampling_params=Bag(extra_args=extra or None),
        arrival_time=100.0, priority=0, num_output_tokens=0, next_decode_eligible_step=0, num_computed_tokens=0,
        is_prefill_chunk=False, blocked=blocked,
    )  # fmt: skip
    request.sampling_params.max_tokens = output
    scheduler.add_request(request)
    return request


def steps(scheduler: Any, num: int) -> list[dict[str, int]]:
    return [scheduler.schedule().num_scheduled_tokens for _ in range(num)]


def test_the_base_is_the_one_that_vllm_would_choose(scheduler: Callable[..., Any]) -> None:
    assert type(scheduler("FILE:LONE")).__mro__[2] is Scheduler
    assert type(scheduler("vllm-diffusion,discipline=FILE:ORDER", True, async_scheduling=True)).__mro__[2] is Async


def test_a_discipline_orders_the_queue_and_sees_what_requests_state(
    scheduler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scheduler("vllm-ar,discipline=FILE:ORDER")
    monkeypatch.setattr("time.time", lambda: 103.0)
    add(s, "a", 2, 9, deadline=7, slo_class="chat")
    add(s, "b", 2, 3)
    add(s, "c", 2, 99, estimated_length="6")
    assert list(steps(s, 1)[0]) == ["b", "c", "a"]
    (view,) = s.dsim.policy.discipline.order.__globals__["VIEWS"]
    assert (view.now, view.num_waiting, view.num_running, view.pages_held, view.num_pages) == (103.0, 3, 0, 2, 32)
    assert (view.fields.max_num_batched_tokens, view.fields.page_size) == (16, 16)
    waiting = view.waiting()
    assert waiting.deadline.tolist() == [107.0, math.inf, math.inf]
    assert waiting.slo_class.tolist() == [class_of("chat"), 0, 0]
    assert (waiting.age.tolist(), waiting.estimate.tolist()) == ([3.0] * 3, [9, 3, 6])
    assert view.waiting(2).index == 2
    assert len(view.running().index) == 0


def test_held_requests_stay_in_the_queue_and_let_others_past(scheduler: Callable[..., Any]) -> None:
    s = scheduler("vllm-ar,discipline=FILE:HOLDS")
    add(s, "a", 3, 1)
    add(s, "b", 2, 9)
    add(s, "c", 2, 2, blocked=True)  # by vLLM itself
    assert steps(s, 1) == [{"b": 2}]
    assert [request.request_id for request in s.waiting] == ["a", "c"]


def test_admission_prompt_tokens_and_rows_are_limited_for_one_step(scheduler: Callable[..., Any]) -> None:
    s = scheduler("vllm-ar,discipline=FILE:ONE")
    add(s, "a", 5, 9)
    add(s, "b", 5, 9)
    assert steps(s, 2) == [{"a": 5}, {"a": 1, "b": 5}]
    s = scheduler("vllm-ar,discipline=FILE:PROMPTS")
    add(s, "a", 5, 9)
    add(s, "b", 5, 9)
    assert steps(s, 3) == [{"a": 3}, {"b": 3}, {"b": 2}]  # a rests, and its row is no part of the budget
    assert (s.max_num_active_reqs, s.max_num_scheduled_tokens) == (4, 16)


def test_canvases_are_capped_as_they_are_admitted_and_as_they_run(scheduler: Callable[..., Any], hook: Hook) -> None:
    s = scheduler("vllm-diffusion,discipline=FILE:STEPS", canvases=True)
    shared = add(s, "a", 8, 8, diffusion_max_steps=4).sampling_params.extra_args
    add(s, "b", 8, 8)
    output = s.schedule()
    caps = [request.sampling_params.extra_args["diffusion_max_steps"] for request in s.running]
    assert (caps, shared, hasattr(output, "dsim_caps")) == ([4, 5], {"diffusion_max_steps": 4}, False)
    assert s.schedule().dsim_caps == {"a": 3, "b": 3}
    assert not hasattr(s.schedule(), "dsim_caps")  # the worker has them
    s.running[0].num_output_tokens = s.running[1].num_output_tokens = 8
    caps = s.schedule().dsim_caps
    assert caps == {"a": 4, "b": 11}
    states = Bag(max_steps=torch.zeros(3), max_denoising_steps=10, single_step_slots={0, 2})
    runner = Bag(req_states=Bag(req_id_to_index={"a": 2, "b": 1}), model_state=Bag(diffusion_states=states))
    hook("vllm").cap_canvases(runner, caps | {"ended": 2})
    assert (states.max_steps.tolist(), states.single_step_slots) == ([0, 10, 4], {0})


def test_a_policy_that_fails_is_logged_once_and_vllms_own_order_goes_on(
    scheduler: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    s = scheduler("vllm-ar,discipline=FILE:BROKEN")
    for name in "abc":
        add(s, name, 2, 9, deadline="soon")
    assert [list(rows) for rows in steps(s, 2)] == [["a", "b", "c"]] * 2
    assert s.dsim.num_errors == 3 + 1  # three deadlines, and the first step; then no request waits
    assert s.dsim.answers() == {"errors": 4}
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith(f"dsim: policy {s.dsim.policy.name} failed, and vLLM's own rule decides: could not convert")


@cases(
    "spec settings says",
    ("lmdeploy-0.18", {}, "batching is LookAhead"),
    ("FILE:DELAYED", {}, "eviction is DelayedCache, .* expected a discipline, alone or on vllm-ar"),
    ("vllm-ar", {}, "it has no discipline, expected one that answers a question"),
    ("vllm-diffusion,discipline=FILE:ORDER", {}, "granularity is Canvas, which vLLM does not do"),
    ("FILE:LONE", {"policy": "priority"}, "vLLM's --scheduling-policy is priority, expected fcfs"),
    ("vllm-ar,max_num_seqs=8,discipline=FILE:ORDER", {}, "max_num_seqs is 8, and vLLM serves with 4"),
    ("FILE:LONE,max_prefill_tokens=64", {}, "max_prefill_tokens is 64, and vLLM serves with its own settings"),
    ("vllm-ar,discipline=FILE:STEPS", {}, "Mine answers steps, expected a policy of canvases"),
)
def test_what_vllm_cannot_honour_is_refused_by_name(
    scheduler: Callable[..., Any], spec: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        scheduler(spec, **settings)


def test_the_log_names_the_policy_and_has_each_steps_answers(
    scheduler: Callable[..., Any], hook: Hook, tmp_path: Path
) -> None:
    s = scheduler("vllm-ar,discipline=FILE:HOLDS")
    hooks = hook("vllm").Hooks(Bag(scheduler=s, model_executor=None), s.config)
    for name, prompt, output in (("a", 3, 9), ("b", 2, 2), ("c", 2, 1)):
        request = add(s, name, prompt, output, deadline=2.5)
        request.arrival_time = time.time()
        hooks.request(request, None)
    hooks.update(s.schedule(), Bag(cudagraph_stats=None))
    hooks.log.close()
    log = read_log(tmp_path / "steps.jsonl")
    assert log.rows.discipline == ({"errors": 0, "order": [2, 1, 0], "holds": [0]},)
    assert log.header.settings["policy"] == s.dsim.policy.name
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["deadline"] for line in lines if line.get("kind") == "request"] == [2.5] * 3
