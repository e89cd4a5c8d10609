"""A dsim policy's order of SGLang's queue, asked before each round (against 0.5.23)."""

import logging
import time

from dsim.engine.discipline import ask
from dsim.engine.errors import PolicyError

from .served_policy import LOGGED, PolicyAsker, columns, served_policy
from .sglang import header

logger = logging.getLogger("sglang.srt.dsim")


def policy_of(spec, scheduler, settings):
    """The SPEC's policy; PolicyError if SGLang cannot honour it. settings: the first line of a step log."""
    if scheduler.schedule_policy != "fcfs":
        raise PolicyError(f"policy {spec}: SGLang's --schedule-policy is {scheduler.schedule_policy}, expected fcfs")
    if scheduler.tp_size > 1:
        raise PolicyError(
            f"policy {spec}: SGLang's --tp-size is {scheduler.tp_size}, expected 1: each rank orders its own queue, by "
            "its own clock"
        )
    served = settings["settings"] | {name: settings[name] for name in ("page_size", "num_pages", "threshold")}
    served |= dict.fromkeys(("block_length", "canvas_length"), settings["block_length"])
    served["dllm_fdfo"] = getattr(scheduler.dllm_config, "first_done_first_out_mode", None)
    return served_policy(spec, "SGLang", settings.get("preset"), served)


class Asker(PolicyAsker):
    def __init__(self, spec, scheduler):
        settings = header(scheduler)
        super().__init__(policy_of(spec, scheduler, settings), "SGLang", logger)
        self._scheduler, self._num_pages, self._order = scheduler, settings["num_pages"], []

    def reorder(self, waiting):
        """Put SGLang's queue, a list, into the policy's order."""
        self._order = []
        try:
            for request in waiting:
                if not hasattr(request, "dsim"):
                    request.dsim = self._numbers_of(request)
            if len(waiting) >= self._ask_from:
                order = ask(self.policy, self._view(waiting)).order.tolist()
                waiting[:] = [waiting[i] for i in order]
                self._order = [request.rid for request in waiting[:LOGGED]]
        except Exception as error:
            self._count(error)

    def _numbers_of(self, request):
        params, arrival = request.sampling_params, request.time_stats.wait_queue_entry_time
        priority = self._scheduler.policy.priority_sign * (request.priority or 0)
        prompt = len(request.origin_input_ids)
        return self.numbers(params.custom_params or {}, arrival, params.max_new_tokens, priority, prompt)

    def _view(self, waiting):
        scheduler = self._scheduler
        room = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        pages_held = self._num_pages - room // scheduler.page_size
        running = list(scheduler.dllm_manager.waiting_queue)
        return self._snapshot(
            time.perf_counter(), list(waiting), running, pages_held=pages_held, num_pages=self._num_pages
        )

    @staticmethod
    def view_of(requests, now):
        return columns([request.dsim for request in requests], [len(request.output_ids) for request in requests], now)

    def answers(self, log):
        """The last decision for a step of the log, requests by number, once."""
        order, self._order = self._order, []
        answers = {"errors": self.num_errors}
        if order:
            answers["order"] = [log.entry(name).number for name in order]
        return answers
