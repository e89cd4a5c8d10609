"""A dsim discipline on vLLM's own scheduler, asked before each decision (against 0.32.0, V1)."""

import time
from operator import attrgetter

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dsim.engine.discipline import Decision, ask
from dsim.engine.errors import PolicyError

from .served_policy import PolicyAsker
from .vllm import MAX_STEPS, header

logger = init_logger("vllm.dsim")  # of vLLM's own handlers
BASES = {
    (False, False): Scheduler,
    (False, True): AsyncScheduler,
    (True, False): DiffusionScheduler,
    (True, True): DiffusionAsyncScheduler,
}  # by whether it decodes canvases, and schedules a step ahead
LOGGED = 64  # requests of an answer


def scheduler_of(vllm_config, **kwargs):
    """The scheduler that vLLM would choose, under the policy that --additional-config names as `dsim_policy`."""
    base = BASES[vllm_config.diffusion_config is not None, bool(vllm_config.scheduler_config.async_scheduling)]
    return type(f"Asking{base.__name__}", (Asking, base), {})(vllm_config=vllm_config, **kwargs)


class Asking:
    """Mixed into a scheduler of vLLM: what it leaves open is decided by `self.dsim`."""

    def __init__(self, vllm_config, **kwargs):
        super().__init__(vllm_config=vllm_config, **kwargs)
        self.dsim = Asker(self, vllm_config)

    def add_request(self, request):
        self.dsim.read(request)
        super().add_request(request)

    def schedule(self, throttle_prefills=False):
        limits = self.max_num_active_reqs, self.max_num_scheduled_tokens
        self.max_num_active_reqs, self.max_num_scheduled_tokens = self.dsim.decide(*limits)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs, self.max_num_scheduled_tokens = limits
        if self.dsim.caps:
            output.dsim_caps = self.dsim.caps  # for the worker (vllm.py)
        return output

    def _handle_blocked_waiting_request(self, request):
        # vLLM asks whether the queue's head is ready; the next one follows if not.
        return super()._handle_blocked_waiting_request(request) and self.dsim.lets_in(request)


class Asker(PolicyAsker):
    num_emitted = attrgetter("num_output_tokens")

    def __init__(self, scheduler, vllm_config):
        spec = (vllm_config.additional_config or {}).get("dsim_policy")
        if not isinstance(spec, str):
            raise PolicyError(f"dsim_policy of --additional-config is {spec}, expected a SPEC or path/to/file.py:NAME")
        order = vllm_config.scheduler_config.policy
        if order != "fcfs":
            raise PolicyError(f"policy {spec}: vLLM's --scheduling-policy is {order}, expected fcfs")
        first, self._pages_a_block = header(vllm_config, scheduler)
        super().__init__(spec, "vLLM", first, logger)
        self._scheduler = scheduler
        self._note_nothing()

    def _note_nothing(self):
        self._waiting, self._running, self._decision = [], [], Decision()
        self._blocked, self._steps = frozenset(), {}
        self.caps = {}  # request's name -> most steps of its canvases from this step on

    def read(self, request):
        """Read what a new request states (docs/engines/vllm.md)."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        prompt = request.num_prompt_tokens
        self.note(request, extra, request.arrival_time, request.max_tokens, request.priority, prompt)
        request.dsim_limit = self.stated(extra, MAX_STEPS, int, 0)  # most steps of a canvas that it allows; 0: any
        request.dsim_cap = None  # ... that the worker has by the discipline

    def decide(self, most_running, most_tokens):
        """Ask about the coming step, if the answers matter; returns its most running requests and tokens."""
        self._note_nothing()
        if len(self._scheduler.waiting) < self._ask_from:
            return most_running, most_tokens
        try:
            return self._applied(ask(self.policy, self._view()), most_running, most_tokens)
        except Exception as error:
            self._note_nothing()
            self._count(error)
            return most_running, most_tokens

    def _view(self):
        scheduler, now = self._scheduler, time.time()
        waiting, running = self._waiting, self._running = list(scheduler.waiting), list(scheduler.running)
        pool = scheduler.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one block is never used
        return self._snapshot(now, waiting, running, round(num_used * self._pages_a_block))

    def _applied(self, decision, most_running, most_tokens):
        scheduler, waiting, running = self._scheduler, self._waiting, self._running
        resting = marked(running, decision.rests)
        if decision.most_admitted is not None:
            present = len(running) + scheduler.num_waiting_for_streaming_input
            most_running = min(most_running, present + decision.most_admitted)
        if decision.most_prompt_tokens is not None:
            row = scheduler.num_sampled_tokens_per_step + scheduler.num_spec_tokens
            num_rows = sum(not request.is_prefill_chunk for request in running)
            num_rows -= sum(not request.is_prefill_chunk for request in resting)
            most_tokens = min(most_tokens, decision.most_prompt_tokens + row * num_rows)
        if decision.steps is not None:
            steps = zip(waiting, decision.steps.tolist(), strict=True)
            self._steps = {request.request_id: cap for request, cap in steps}
        if decision.steps_now is not None:
            for request, steps in zip(running, decision.steps_now.tolist(), strict=True):
                cap = min(steps, request.dsim_limit or steps)
                if cap != request.dsim_cap:
                    self.caps[request.request_id] = request.dsim_cap = cap
        self._blocked = frozenset(request.request_id for request in marked(waiting, decision.holds))
        if decision.order is not None:
            scheduler.waiting.clear()
            scheduler.waiting.extend([waiting[i] for i in decision.order.tolist()])
        for request in resting:  # `schedule` counts its step before it compares
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + 2)
        self._decision = decision
        return most_running, most_tokens

    def lets_in(self, request):
        """Whether a waiting request may be admitted; then its canvases are capped."""
        name = request.request_id
        if name in self._blocked:
            return False
        if (steps := self._steps.get(name)) is not None:
            limit, params = request.dsim_limit, request.sampling_params
            # A worker reads it as it admits the request; a copy, since requests may share it.
            params.extra_args = {**(params.extra_args or {}), MAX_STEPS: min(steps, limit or steps)}
        request.dsim_cap = None
        return True

    def answers(self):
        """The last decision for the step log, requests by name, at most LOGGED of each answer."""
        decision, waiting, running = self._decision, self._waiting, self._running
        answers = {"errors": self.num_errors}
        for name in ("most_admitted", "most_prompt_tokens"):
            if (number := getattr(decision, name)) is not None:
                answers[name] = number
        if decision.order is not None:
            answers["order"] = [waiting[i].request_id for i in decision.order[:LOGGED].tolist()]
        for name, requests in (("holds", waiting), ("rests", running)):
            if getattr(decision, name) is not None:
                answers[name] = [request.request_id for request in marked(requests, getattr(decision, name))[:LOGGED]]
        for name, requests in (("steps", waiting), ("steps_now", running)):
            if (steps := getattr(decision, name)) is not None:
                names = [request.request_id for request in requests[:LOGGED]]
                answers[name] = list(zip(names, steps.tolist(), strict=False))
        return answers


def marked(requests, marks):
    """Requests with a mark, [requests] or None."""
    if marks is None:
        return []
    return [requests[i] for i in np.flatnonzero(marks).tolist()]
