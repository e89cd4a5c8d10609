"""vLLM: a general plug-in around EngineCore and its scheduler (written against 0.32.0, V1)."""

import functools
import time
import weakref

from . import log as steplog


def register():
    """Called by vLLM in each of its processes; only one that runs an EngineCore opens a log."""
    if steplog.wanted() is None:
        return
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore, "_dsim_hooked", False):
        return
    EngineCore._dsim_hooked = True
    # An engine loads its plug-ins as its first act: the one being built is hooked by the class's other methods.
    steplog.hook_class(EngineCore, "__init__", _build)
    steplog.hook_class(EngineCore, "add_request", _add)
    # The engine looks for requests between two steps; a thread of its own takes them in as they come.
    if hasattr(EngineCore, "preprocess_add_request"):
        steplog.hook_class(EngineCore, "preprocess_add_request", _come)


def _build(engine, original, vllm_config, *args, **kwargs):
    original(engine, vllm_config, *args, **kwargs)
    hook(engine, vllm_config)


def _add(engine, original, request, *args, **kwargs):
    hooked = hook(engine, engine.vllm_config)
    params = request.sampling_params
    came = _CAME.pop(request.request_id, None)
    hooked.log.request(
        request.request_id, request.num_prompt_tokens, None if params is None else params.max_tokens,
        request.arrival_time, None if came is None else hooked.log.at(came),
    )  # fmt: skip
    return original(engine, request, *args, **kwargs)


def _come(engine, original, request, *args, **kwargs):
    _CAME[request.request_id] = time.perf_counter()
    return original(engine, request, *args, **kwargs)


_CAME = {}  # request -> when it reached the engine, on the clock of time.perf_counter
_HOOKED = weakref.WeakKeyDictionary()


def hook(engine, config):
    """The hooks of an engine, put in place once."""
    if engine not in _HOOKED:
        _HOOKED[engine] = Hooks(engine, config)
    return _HOOKED[engine]


class Hooks:
    """Takes down each step of an engine.

    A step begins when it is scheduled, or where the last one ended if there was work left then: the time between two
    steps is the later one's. It ends when the scheduler has taken its output in. With asynchronous scheduling steps
    overlap, and each is as long as the time between two ends.
    """

    def __init__(self, engine, config):
        self.log = steplog.StepLog(steplog.wanted(), header(config))
        self._scheduler = scheduler = engine.scheduler
        self._diffusion = bool(getattr(config.model_config, "is_diffusion", False))
        self._plans = {}  # id of a scheduler's output -> (when, rows, waiting, running, pages, preempted)
        self._end = None  # of the last step, where work was left
        self._device = DeviceTime(engine.model_executor)
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self, *args, **kwargs):
        begin = self.log.now()
        output = self._schedule(*args, **kwargs)
        if self.log.on and output.total_num_scheduled_tokens:
            with self.log.harmless():
                num, requests = output.num_scheduled_tokens, self._scheduler.requests
                # A scheduled request counts as computed.
                rows = list(num), list(num.values()), [requests[name].num_computed_tokens for name in num]
                self._plans[id(output)] = begin, rows, self._state(), self._device.begin()
        return output

    def update(self, output, model_output, *args, **kwargs):
        found = self._update(output, model_output, *args, **kwargs)
        end = self.log.now()
        plan = self._plans.pop(id(output), None)
        if plan is not None:
            with self.log.harmless():
                self._step(end, plan, model_output, found)
        self._end = end if self._scheduler.has_requests() else None
        return found

    def _step(self, end, plan, model_output, found):
        """Take down a step that ends now."""
        begin, rows, state, events = plan
        start = begin if self._end is None else self._end
        graph = getattr(model_output, "cudagraph_stats", None)
        if graph is not None:
            state["graph"] = "NONE" not in str(graph.runtime_mode)
        device = self._device.end(events)
        if device is not None and 0 < device <= end - start:
            state["device"] = device
        # Numbers and names alone: an output that is kept for later is work for the garbage collector.
        emitted, over = {}, []
        for outputs in found.values():
            for one in outputs.outputs:
                emitted[one.request_id] = len(one.new_token_ids)
                if one.finish_reason is not None:
                    over.append(one.request_id)
        self.log.step_later(start, end - start, functools.partial(self._told, rows, state, emitted, over))

    def _told(self, rows, state, emitted, over):
        """The columns of a step for StepLog.step_later, in the log's own thread."""
        names, tokens, keys = rows
        emitted = [emitted.get(name, 0) for name in names]
        # Of a row that decodes one token; others are put right below.
        phases, prompts, pairs, heads = ["decode"] * len(names), 0, sum(keys), len(names)
        for i, (n, key, prompt) in enumerate(zip(tokens, keys, map(self.log.input_length, names), strict=True)):
            if n == 1 and key > prompt and not self._diffusion:
                continue
            of_prompt = max(0, min(n, prompt - (key - n)))
            prompts += of_prompt
            # A canvas sees itself whole, and all of it goes through the LM head; other queries see what is before them.
            canvas = self._diffusion and not of_prompt
            pairs += (n * key if canvas else n * (2 * key - n + 1) // 2) - key
            heads += n - 1 if canvas else 0
            if of_prompt:
                phases[i] = "prefill"
            elif canvas:  # it is handed out with the pass that leaves its keys and values
                phases[i] = "flush" if emitted[i] else "denoise"
        more = {"prefill_tokens": prompts, "sum_q_kv": pairs, "head_rows": heads, "sampled_rows": heads, **state}
        return names, phases, tokens, keys, emitted, more, over

    def _state(self):
        scheduler = self._scheduler
        found = {"waiting": len(scheduler.waiting), "running": len(scheduler.running)}
        pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        if pool is not None:
            found["pages"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return found


class DeviceTime:
    """CUDA events around a step's forward, where the executor runs in this process; read when the step is over."""

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
        """s; None where nobody knows. The step's output is here, so that the events wait for little."""
        if pair is None:
            return None
        pair[1].record()
        pair[1].synchronize()
        return pair[0].elapsed_time(pair[1]) / 1e3


SETTINGS = (
    "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "enable_chunked_prefill",
    "scheduler_reserve_full_isl", "async_scheduling",
)  # fmt: skip


def header(config):
    """The log's first line, from vLLM's configuration."""
    import torch
    import vllm

    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    device, memory = steplog.device_of(torch)
    shape = steplog.shape_of(model.hf_config, model.max_model_len)
    served = model.served_model_name
    shape["name"] = str(served[0] if isinstance(served, list) else served)
    canvas = getattr(model.hf_config, "canvas_length", None) if getattr(model, "is_diffusion", False) else None
    return {
        "synthetic": False, "engine": f"vLLM {vllm.__version__}, V1" + (", eager" if model.enforce_eager else ""),
        "device": device, "memory_bytes": memory, "num_devices": config.parallel_config.tensor_parallel_size,
        "model": shape, "block_length": int(canvas or 1), "threshold": 1.0, "temperature": 0.0,
        "page_size": cache.block_size, "num_pages": cache.num_gpu_blocks, "torch": torch.__version__,
        "preset": "vllm-diffusion" if canvas else "vllm-ar",
        "settings": {
            **{name: getattr(scheduler, name, None) for name in SETTINGS},
            "prefix_caching": bool(cache.enable_prefix_caching), "dtype": str(model.dtype).replace("torch.", ""),
        },
    }  # fmt: skip
