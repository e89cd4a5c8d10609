"""A dsim discipline on vLLM's own scheduler, asked before each decision (against 0.32.0, V1)."""

import functools
import time
from dataclasses import replace

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dsim import __version__
from dsim.engine.allowed_code import allowed
from dsim.engine.discipline import Decision, ask, ask_from
from dsim.engine.engine import record_of
from dsim.engine.errors import PolicyError
from dsim.engine.part import Policy, numbers_of
from dsim.engine.policy import AXES, PRESETS, named_fields, named_files, parse, settings_of
from dsim.engine.records import table
from dsim.engine.view import RequestView, Snapshot, class_of

from .vllm import MAX_STEPS, SETTINGS, header

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


def served_policy(spec, vllm_config, settings):
    """vLLM's preset, as served, under the SPEC's discipline; PolicyError if the SPEC asks vLLM for anything else.

    settings: the first line of a step log.
    """
    code = allowed(named_files(spec))
    policy = parse(spec, code)
    preset = PRESETS[settings["preset"]].policy
    for axis in AXES:
        part, kinds = getattr(policy, axis), {type(getattr(base, axis)) for base in (preset, Policy("usual"))}
        if axis != "discipline" and type(part) not in kinds:
            raise PolicyError(
                f"policy {spec}: {axis} is {type(part).__name__}, which vLLM does not do: expected a discipline, alone "
                f"or on {settings['preset']}"
            )
    if not policy.discipline.questions:
        raise PolicyError(f"policy {spec}: it has no discipline, expected one that answers a question")
    order = vllm_config.scheduler_config.policy
    if order != "fcfs":
        raise PolicyError(f"policy {spec}: vLLM's --scheduling-policy is {order}, expected fcfs")
    served = settings["settings"] | {name: settings[name] for name in ("page_size", "num_pages")}
    served["canvas_length"] = settings["block_length"]
    fields, stated = vars(policy.discipline), settings_of(policy)
    for name in sorted(named_fields(spec, code) - fields.keys()):
        if name not in served or stated[name] != served[name]:
            value = served.get(name, "its own settings")
            raise PolicyError(f"policy {spec}: {name} is {stated[name]}, and vLLM serves with {value}")
    granularity = preset.granularity
    if vllm_config.diffusion_config is not None:
        granularity = replace(granularity, canvas_length=served["canvas_length"])
    return replace(
        preset,
        name=spec,
        batching=replace(preset.batching, **{name: served[name] for name in SETTINGS}),
        granularity=granularity,
        memory=replace(preset.memory, page_size=served["page_size"], num_pages=served["num_pages"]),
        discipline=policy.discipline,
    )


class Asking:
    """Mixed into a scheduler of vLLM: what it leaves open is decided by `self.dsim`."""

    def __init__(self, vllm_config, **kwargs):
        super().__init__(vllm_config=vllm_config, **kwargs)
        self.dsim = Asker(self, vllm_config)

    def add_request(self, request):
        self.dsim.note(request)
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


class Facts:
    """What a request states, read once."""

    __slots__ = ("cap", "limit", "numbers")

    def __init__(self, numbers, limit):
        self.numbers = numbers  # index, arrival, deadline, slo_class, priority, prompt, estimate
        self.limit = limit  # most steps of a canvas that it allows, or None
        self.cap = None  # ... that the worker has by the discipline


class Asker:
    """Asks a policy's discipline for one scheduler.

    The policy's errors are logged once and counted, and vLLM's own rule decides.
    """

    def __init__(self, scheduler, vllm_config):
        spec = (vllm_config.additional_config or {}).get("dsim_policy")
        if not isinstance(spec, str):
            raise PolicyError(f"dsim_policy of --additional-config is {spec}, expected a SPEC or path/to/file.py:NAME")
        settings, self._pages_a_block = header(vllm_config, scheduler)
        self._scheduler, self._settings = scheduler, settings
        self.policy = served_policy(spec, vllm_config, settings)
        self.names = {"policy": spec, "dsim": __version__}  # for the step log
        self._fields, self._record = (table(array)[0] for array in (numbers_of(self.policy), record_of(self.policy)))
        self._ask_from = ask_from(self.policy.discipline)
        self.num_errors = self._num_requests = 0
        self._note_nothing()
        questions = ", ".join(sorted(self.policy.discipline.questions))
        logger.info("dsim %s: policy %s answers %s", __version__, spec, questions)

    def _note_nothing(self):
        self._waiting, self._running, self._decision = [], [], Decision()
        self._blocked, self._steps = frozenset(), {}
        self.caps = {}  # request's name -> most steps of its canvases from this step on

    def note(self, request):
        """Read what a new request states (docs/engines/vllm.md)."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        deadline, slo_class, estimate, limit = np.inf, 0, request.max_tokens, None
        try:
            if MAX_STEPS in extra:
                limit = int(extra[MAX_STEPS])
            slo_class = class_of(str(extra.get("slo_class", "")))
            estimate = int(extra.get("estimated_length", estimate))
            deadline = request.arrival_time + float(extra.get("deadline", deadline))
        except Exception as error:
            self._count(error)
        numbers = (
            self._num_requests, request.arrival_time, deadline, slo_class, request.priority,
            request.num_prompt_tokens, estimate,
        )  # fmt: skip
        request.dsim = Facts(numbers, limit)
        self._num_requests += 1

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

    def _count(self, error):
        self.num_errors += 1
        if self.num_errors == 1:
            logger.exception("dsim: policy %s failed, and vLLM's own rule decides: %s", self.policy.name, error)

    def _view(self):
        scheduler, now = self._scheduler, time.time()
        waiting, running = self._waiting, self._running = list(scheduler.waiting), list(scheduler.running)
        pool = scheduler.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one block is never used
        return Snapshot(
            now=now,
            num_waiting=len(waiting),
            num_running=len(running),
            num_rows=0,
            pages_held=round(num_used * self._pages_a_block),
            num_pages=self._settings["num_pages"],
            threshold=0,
            fields=self._fields.copy(),
            record=self._record,
            engine=tuple(functools.cache(functools.partial(columns, rows, now)) for rows in (waiting, running)),
        )

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
                cap = min(steps, request.dsim.limit or steps)
                if cap != request.dsim.cap:
                    self.caps[request.request_id] = request.dsim.cap = cap
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
            limit, params = request.dsim.limit, request.sampling_params
            # A worker reads it as it admits the request; a copy, since requests may share it.
            params.extra_args = {**(params.extra_args or {}), MAX_STEPS: min(steps, limit or steps)}
        request.dsim.cap = None
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


def columns(requests, now):
    """The view of these requests."""
    numbers = np.array([request.dsim.numbers for request in requests], np.float64).reshape(-1, 7).T
    index, arrival, deadline, slo_class, priority, prompt, estimate = numbers
    return RequestView(
        index=index.astype(np.int64),
        arrival=arrival,
        age=now - arrival,
        slo_class=slo_class.astype(np.int64),
        deadline=deadline,
        priority=priority.astype(np.int64),
        prompt=prompt.astype(np.int64),
        estimate=estimate.astype(np.int64),
        emitted=np.array([request.num_output_tokens for request in requests], np.int64),
    )
