"""A dsim policy's order of SGLang's queue, asked before each round (against 0.5.23)."""

import logging
import time

from dsim.engine.discipline import ask
from dsim.engine.errors import PolicyError

from .served_policy import PolicyAsker
from .sglang import header

logger = logging.getLogger("sglang.srt.dsim")


class Asker(PolicyAsker):
    def __init__(self, spec, scheduler):
        order, num_ranks = scheduler.schedule_policy, scheduler.tp_size
        if order != "fcfs":
            raise PolicyError(f"policy {spec}: SGLang's --schedule-policy is {order}, expected fcfs")
        if num_ranks > 1:  # each has a scheduler
            raise PolicyError(f"policy {spec}: SGLang's --tp-size is {num_ranks}, expected 1: ranks' clocks differ")
        super().__init__(spec, "SGLang", header(scheduler), logger)
        self._scheduler = scheduler

    def reorder(self, waiting):
        """Put SGLang's queue, a list, into the policy's order."""
        try:
            for request in waiting:
                if not hasattr(request, "dsim"):
                    self._read(request)
            if len(waiting) >= self._ask_from:
                order = ask(self.policy, self._view(waiting)).order.tolist()
                waiting[:] = [waiting[i] for i in order]
        except Exception as error:
            self._count(error)

    def _read(self, request):
        params, arrival = request.sampling_params, request.time_stats.wait_queue_entry_time
        priority = self._scheduler.policy.priority_sign * (request.priority or 0)
        prompt = len(request.origin_input_ids)
        self.note(request, params.custom_params or {}, arrival, params.max_new_tokens, priority, prompt)

    def _view(self, waiting):
        scheduler, pool = self._scheduler, self._scheduler.token_to_kv_pool_allocator
        room = getattr(pool, "full_available_size", pool.available_size)() + scheduler.tree_cache.evictable_size()
        pages_held = self._num_pages - room // scheduler.page_size
        return self._snapshot(
            time.perf_counter(), list(waiting), list(scheduler.dllm_manager.waiting_queue), pages_held
        )

    @staticmethod
    def num_emitted(request):
        return len(request.output_ids)
