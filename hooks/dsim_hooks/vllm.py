"""vLLM: a general plug-in around EngineCore and its scheduler (against 0.32.0, V1)."""

import functools
import logging
import sys
import time
import weakref

from . import log as steplog

MAX_STEPS = "diffusion_max_steps"
STATED = (MAX_STEPS, "estimated_length", "deadline", "slo_class")  # extra arguments of a request
WORKER = "vllm.v1.worker.worker_base"


def policy_scheduler(vllm_config, **kwargs):
    """vLLM's --scheduler-cls: its own scheduler under a dsim policy (README.md)."""
    from .vllm_policy import scheduler_of

    hook_worker()
    return scheduler_of(vllm_config, **kwargs)


def register():
    """Called in each process of vLLM; one with an EngineCore opens a log."""
    hook_worker()
    if steplog.log_path() is None:
        return
    with steplog.harmless("everything"):
        from vllm.v1.engine.core import EngineCore

        if getattr(EngineCore, "_dsim_hooked", False):
            return
        # Another thread receives requests.
        if hasattr(EngineCore, "preprocess_add_request"):
            steplog.hook_class(EngineCore, "preprocess_add_request", _come)
        # Plug-ins load while an engine is built: other methods are hooked then.
        steplog.hook_class(EngineCore, "__init__", _build)
        steplog.hook_class(EngineCore, "add_request", _add)
        EngineCore._dsim_hooked = True


def hook_worker():
    """Where this process has vLLM's workers, apply the caps that a policy puts on running canvases."""
    if WORKER in sys.modules and not hasattr(sys.modules[WORKER], "_dsim_hooked"):
        steplog.hook_class(sys.modules[WORKER].WorkerWrapperBase, "execute_model", _execute)
        sys.modules[WORKER]._dsim_hooked = True


def _execute(wrapper, original, output, *args, **kwargs):
    if caps := getattr(output, "dsim_caps", None):
        try:
            cap_canvases(wrapper.worker.model_runner, caps)
        except Exception:
            _cannot_cap()
    return original(wrapper, output, *args, **kwargs)


def cap_canvases(runner, caps):
    """From this step on, end canvases that have had so many steps. caps: request -> steps."""
    slots, states = runner.req_states.req_id_to_index, runner.model_state.diffusion_states
    for name, steps in caps.items():
        if (slot := slots.get(name)) is not None:
            states.max_steps[slot].fill_(min(steps, states.max_denoising_steps))
            if steps > 1:  # it will look at the step before, also if it was admitted for one
                states.single_step_slots.discard(slot)


@functools.cache
def _cannot_cap():
    """Say it once."""
    logging.getLogger("vllm.dsim").exception("dsim: running canvases keep the steps they were admitted with")


def _build(engine, original, vllm_config, *args, **kwargs):
    original(engine, vllm_config, *args, **kwargs)
    hook(engine, vllm_config)


def _add(engine, original, request, *args, **kwargs):
    with steplog.harmless("a request"):
        arrival = _CAME.pop(request.request_id, None)
        hooked = hook(engine, engine.vllm_config)
        if hooked is not None:
            hooked.request(request, arrival)
    return original(engine, request, *args, **kwargs)


def _come(engine, original, request, *args, **kwargs):
    with steplog.harmless("when requests reach the engine"):
        _CAME[request.request_id] = time.perf_counter()
    return original(engine, request, *args, **kwargs)


_CAME = {}  # request -> arrival at the engine (time.perf_counter)
_HOOKED = weakref.WeakKeyDictionary()


def hook(engine, config):
    """Once an engine; None if it failed."""
    with steplog.harmless("everything"):
        if engine not in _HOOKED:
            _HOOKED[engine] = None
            _HOOKED[engine] = Hooks(engine, config)
        return _HOOKED[engine]


class Hooks:
    """Records an engine's steps.

    A step begins when it is scheduled, or at the previous end if work was left, and ends when its output is processed.
    With asynchronous scheduling each lasts from one end to the next.
    """

    def __init__(self, engine, config):
        self._scheduler = scheduler = engine.scheduler
        self._diffusion = is_diffusion(config.model_config)
        first, self._pages_a_block = header(config, scheduler)
        if hasattr(scheduler, "dsim"):  # by policy_scheduler
            first["settings"] |= scheduler.dsim.names
        self.log = steplog.StepLog(steplog.log_path(), first)
        self._plans = {}  # id of a scheduler's output -> (when, rows, state, events)
        self._end = None  # of the last step, if work was left
        self._device = steplog.read("device", lambda: DeviceTime(engine.model_executor))
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def request(self, request, arrival):
        """arrival: at the engine (time.perf_counter), or None."""
        params = request.sampling_params
        extra = getattr(params, "extra_args", None) or {}
        self.log.request(
            request.request_id,
            request.num_prompt_tokens,
            None if params is None else params.max_tokens,
            request.arrival_time,
            None if arrival is None else self.log.at(arrival),
            **{name: extra[name] for name in STATED if name in extra},
        )

    def schedule(self, *args, **kwargs):
        begin = self.log.now()
        output = self._schedule(*args, **kwargs)
        if self.log.on:
            with self.log.step_left_out():
                self._plan(begin, output)
        return output

    def _plan(self, begin, output):
        """A scheduled step's work."""
        if not output.total_num_scheduled_tokens:
            return
        num, requests = output.num_scheduled_tokens, self._scheduler.requests
        # A scheduled request counts as computed; a canvas is a row of drafts.
        rows = (
            list(num),
            list(num.values()),
            [requests[name].num_computed_tokens for name in num],
            set(output.scheduled_spec_decode_tokens),
        )
        events = steplog.read("device", self._device.begin) if self._device is not None else None
        self._plans[id(output)] = begin, rows, self._state(), events

    def update(self, output, model_output, *args, **kwargs):
        outputs = self._update(output, model_output, *args, **kwargs)
        end = self.log.now()
        plan = self._plans.pop(id(output), None)
        if plan is not None:
            with self.log.step_left_out():
                self._step(end, plan, model_output, outputs)
        self._end = end if steplog.read("idle times", self._scheduler.has_requests) else None
        return outputs

    def _step(self, end, plan, model_output, by_client):
        """A step that ends now."""
        begin, rows, state, events = plan
        start = begin if self._end is None else self._end
        graph = steplog.read("graph", lambda: model_output.cudagraph_stats)
        if graph is not None:
            state["graph"] = steplog.read("graph", lambda: "NONE" not in str(graph.runtime_mode))
        device = steplog.read("device", lambda: self._device.end(events)) if events is not None else None
        if device is not None and 0 < device <= end - start:
            state["device"] = device
        # Numbers and names only, for the garbage collector.
        emitted, ended = {}, []
        for outputs in by_client.values():
            for output in outputs.outputs:
                emitted[output.request_id] = len(output.new_token_ids)
                if output.finish_reason is not None:
                    ended.append(output.request_id)
        self.log.step_later(start, end - start, functools.partial(self._columns, rows, state, emitted, ended))

    def _columns(self, rows, state, emitted, ended):
        """For StepLog.step_later, in the log's thread."""
        names, tokens, keys, drafted = rows
        emitted = [emitted.get(name, 0) for name in names]
        # First as if each row decoded one token.
        phases, prompts, pairs, heads, sampled = ["decode"] * len(names), 0, sum(keys), len(names), len(names)
        for i, (name, n) in enumerate(zip(names, tokens, strict=True)):
            request, key, phase, logits = self.log.entry(name), keys[i], "decode", 1
            new = emitted[i]
            if name in drafted:
                # The scheduler counts drafts in flight as computed; these keys are exact.
                keys[i] = request.num_tokens + n - (not self._diffusion)
                logits = n
                if self._diffusion:  # storing a canvas's keys and values emits it
                    phase, new = ("flush", n) if new else ("denoise", 0)
            elif self._diffusion or n > 1 or key <= request.input_length:
                # A prompt, or tokens that lost their keys and values. Nothing is sampled before a canvas.
                phase, logits, prompts = "prefill", 0 if self._diffusion else 1, prompts + n
            request.num_tokens += new
            if n == 1 and phase == "decode":
                continue
            phases[i] = phase
            pairs += steplog.pairs(n, keys[i], bidirectional=phase == "denoise") - key
            heads += logits - 1
            # A canvas's last pass discards its logits.
            sampled += (0 if phase == "flush" else logits) - 1
        extra = {"prefill_tokens": prompts, "sum_q_kv": pairs, "head_rows": heads, "sampled_rows": sampled, **state}
        if "discipline" in state:
            extra["discipline"] = self._numbered(state["discipline"])
        return names, phases, tokens, keys, emitted, extra, ended

    def _numbered(self, answers):
        """A discipline's answers, with the log's numbers for requests."""

        def number(value):
            if isinstance(value, tuple):
                return number(value[0]), value[1]
            return self.log.entry(value).number

        return {
            name: [number(row) for row in value] if isinstance(value, list) else value
            for name, value in answers.items()
        }

    def _state(self):
        scheduler = self._scheduler
        return steplog.readable(
            {
                "waiting": lambda: len(scheduler.waiting),
                "running": lambda: len(scheduler.running),
                "pages": self._pages,
                "discipline": lambda: scheduler.dsim.answers() if hasattr(scheduler, "dsim") else None,
            }
        )

    def _pages(self):
        pool = self._scheduler.kv_cache_manager.block_pool
        # One block of the pool is never used.
        return round((pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * self._pages_a_block)


class DeviceTime:
    """CUDA events around a forward, if the executor is in this process."""

    def __init__(self, executor):
        import torch

        self._torch = torch
        self.known = torch.cuda.is_available() and type(executor).__name__ == "UniProcExecutor"

    def begin(self):
        if not self.known:
            return None
        pair = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        return pair

    def end(self, pair):
        """s, or None if unknown. The output has arrived, so the wait is short."""
        if pair is None:
            return None
        pair[1].record()
        pair[1].synchronize()
        return pair[0].elapsed_time(pair[1]) / 1e3


# vLLM's methods of drafting by dsim's drafters.
DRAFTERS = {name: name for name in ("ngram", "eagle", "draft_model", "dflash", "dspark")}
DRAFTERS |= {"eagle3": "eagle", "mtp": "eagle"}
SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "async_scheduling",
)


def header(config, engine_scheduler):
    """The log's first line, and pages a block of the pool."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    canvas = steplog.read("block_length", lambda: model.hf_config.canvas_length if is_diffusion(model) else 1)
    pool = steplog.read("page_size", lambda: pool_of(engine_scheduler.kv_cache_config, model.hf_config))
    pages_a_block = 1 if pool is None else pool[1]
    return steplog.readable(
        {
            "synthetic": lambda: False,
            "engine": lambda: engine_of(model),
            **steplog.machine(),
            "num_devices": lambda: config.parallel_config.tensor_parallel_size,
            "model": lambda: {
                "name": name_of(model),
                "context_limit": model.max_model_len,
                "config": steplog.config_of(model.hf_config),
            },
            "block_length": lambda: canvas,
            "threshold": lambda: 1.0,
            "temperature": lambda: 0.0,
            "page_size": lambda: cache.block_size if pool is None else pool[0],
            "num_pages": lambda: round((cache.num_gpu_blocks - 1) * pages_a_block),
            "preset": lambda: "vllm-diffusion" if is_diffusion(model) else "vllm-ar",
            "settings": lambda: steplog.readable(
                {
                    **{name: functools.partial(getattr, scheduler, name, None) for name in SETTINGS},
                    "prefix_caching": lambda: bool(cache.enable_prefix_caching),
                    "dtype": lambda: str(model.dtype).replace("torch.", ""),
                    **drafting(getattr(config, "speculative_config", None)),
                }
            ),
        }
    ), pages_a_block


def drafting(speculative):
    """What reads the settings of a SpeculativeConfig, or of none."""
    if speculative is None:
        return {}
    return {
        "speculative_method": lambda: speculative.method,
        "drafter": lambda: DRAFTERS.get(speculative.method),
        "num_speculative_tokens": lambda: speculative.num_speculative_tokens,
        "draft_architecture": lambda: speculative.draft_model_config.hf_config.architectures[0],
        "adaptive_verification": lambda: bool(speculative.enable_adaptive_verification),
    }


def is_diffusion(model):
    """Whether it decodes canvases."""
    return bool(getattr(model, "is_diffusion", False))


def engine_of(model):
    """vLLM's name, version and way to run forwards."""
    import vllm

    return f"vLLM {vllm.__version__}, V1" + (", eager" if model.enforce_eager else "")


def name_of(model):
    """As served."""
    served = model.served_model_name
    return str(served[0] if isinstance(served, list) else served)


def pool_of(kv, config):
    """Tokens a page, and pages a block of vLLM's pool.

    A page holds `page_size` tokens of layers with full attention, a block those of one group's layers; groups have
    equally many layers, and a token takes a block of each.
    """
    groups = kv.kv_cache_groups
    full = next((group for group in groups if getattr(group.kv_cache_spec, "sliding_window", None) is None), groups[0])
    kinds = getattr(getattr(config, "text_config", None) or config, "layer_types", None) or ["full_attention"]
    num_full = len(kinds) - kinds.count("sliding_attention") or len(kinds)
    in_group, layers = max(len(group.layer_names) for group in groups), sum(len(group.layer_names) for group in groups)
    return full.kv_cache_spec.block_size, in_group * len(kinds) / (layers * num_full)
