"""SGLang: a general plug-in around the scheduler's batches and diffusion blocks' forwards (against 0.5.23)."""

import functools
import os

from . import log as steplog

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ALGORITHM = "sglang.srt.dllm.algorithm.base.DllmAlgorithm"
SPEC = "DSIM_POLICY"  # variable

_STATE = {}  # the log (None if it failed), batches in flight, and what asks a policy


def register():
    """Called in each process of SGLang; the first request's opens a log, and a scheduler's asks a policy."""
    if SPEC in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{SCHEDULER}.init_schedule_policy", around_policy, HookType.AROUND)
        HookRegistry.register(
            "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", around_priority, HookType.AROUND
        )
    if steplog.log_path() is None:
        return
    with steplog.harmless("everything"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, around in (
            (f"{SCHEDULER}.handle_generate_request", around_request),
            (f"{SCHEDULER}.run_batch", around_run),
            (f"{SCHEDULER}.process_batch_result", around_result),
            (f"{ALGORITHM}.run", around_blocks),
        ):
            HookRegistry.register(target, around, HookType.AROUND)


def around_policy(original, scheduler):
    """PolicyError, which ends the scheduler, for a policy that SGLang cannot honour."""
    from .sglang_policy import Asker

    original(scheduler)
    _STATE["asker"] = Asker(os.environ[SPEC], scheduler)


def around_priority(original, policy, waiting_queue, *args, **kwargs):
    original(policy, waiting_queue, *args, **kwargs)
    _STATE["asker"].reorder(waiting_queue)


def around_request(original, scheduler, request, *args, **kwargs):
    if "log" not in _STATE:
        _STATE.update(log=None, begun={}, end=None, forwards=[], rows=[], by_law=False)
        with steplog.harmless("everything"):
            first = header(scheduler)
            if "asker" in _STATE:
                first["settings"] |= _STATE["asker"].names
            _STATE["log"] = steplog.StepLog(steplog.log_path(), first)
    if _STATE["log"] is not None:
        with steplog.harmless("a request"):
            limit = request.sampling_params.max_new_tokens
            _STATE["log"].request(request.rid, len(request.input_ids or ()), limit)
    return original(scheduler, request, *args, **kwargs)


def around_run(original, scheduler, batch, *args, **kwargs):
    """The result comes later, with the batch or (overlap scheduling) a copy."""
    log = _STATE.get("log")
    if log is None:
        return original(scheduler, batch, *args, **kwargs)
    begin = log.now()
    _STATE.update(forwards=[], rows=[])
    with log.step_left_out():
        _STATE["rows"] = rows_of(batch)
    rows = _STATE["rows"]
    state = steplog.readable({"waiting": lambda: len(scheduler.waiting_queue), "running": lambda: len(batch.reqs)})
    result = original(scheduler, batch, *args, **kwargs)
    if log.on:
        _STATE["begun"][id(result)] = begin, rows, state, _STATE["forwards"]
    return result


def around_result(original, scheduler, batch, result, *args, **kwargs):
    """The batch's output has reached its requests."""
    log = _STATE.get("log")
    plan = None if log is None else _STATE["begun"].pop(id(result), None)
    if plan is None:
        return original(scheduler, batch, result, *args, **kwargs)
    before = []
    with log.step_left_out():
        before = [num_tokens(req) for req in batch.reqs]
    outcome = original(scheduler, batch, result, *args, **kwargs)
    end = log.now()
    with log.step_left_out():
        _write_steps(log, end, plan, batch, before)
    _STATE["end"] = end if steplog.read("idle times", lambda: has_work(scheduler, batch)) else None
    return outcome


def _write_steps(log, end, plan, batch, before):
    """Of a batch that ended. before: tokens that each request had."""
    begin, rows, state, forwards = plan
    # The time between steps counts for the later one.
    start = begin if _STATE["end"] is None else _STATE["end"]
    emitted = {req.rid: num_tokens(req) - num_before for req, num_before in zip(batch.reqs, before, strict=True)}
    forwards = forwards or [(end, rows, ())]
    for i, (forward_end, rows, settled) in enumerate(forwards, 1):
        last = i == len(forwards)  # tokens are emitted after the last forward
        forward_end = end if last else forward_end
        records = [(*row, max(0, emitted.get(row[0], 0)) if last else 0) for row in rows]
        number = write(log, start, forward_end, records, **state)
        for name, block_start, positions in settled:
            log.sequence(number, name, block_start, positions)
        start = forward_end
    for req in batch.reqs:
        if req.finished():
            log.finished(req.rid)


def num_tokens(req):
    """Without what a block computes past the request's end."""
    num, end = len(req.output_ids), req.finished_len
    return num if end is None else min(num, end)


def has_work(scheduler, batch):
    blocks = getattr(scheduler, "dllm_manager", None)  # requests whose blocks are decoded
    requests = [*batch.reqs, *(blocks.waiting_queue if blocks is not None else ())]
    return bool(scheduler.waiting_queue) or not all(req.finished() for req in requests)


def around_blocks(original, algorithm, *args, **kwargs):
    """One forward, or several until the slowest block ends; each is a step."""
    with steplog.harmless("the forwards of a batch"):
        _hook_step(type(algorithm))
    return original(algorithm, *args, **kwargs)


def _hook_step(kind):
    """Wrap `step`, which processes a forward's logits; once a class."""
    if getattr(kind.step, "_dsim_hooked", False):
        return
    step = kind.step

    @functools.wraps(step)
    def hooked(self, forward_batch, *args, **kwargs):
        log = _STATE.get("log")
        if log is None or not log.on:
            return step(self, forward_batch, *args, **kwargs)
        before = steplog.read("the forwards of a batch", forward_batch.input_ids.clone)
        done = step(self, forward_batch, *args, **kwargs)
        with log.step_left_out():
            _STATE["forwards"].append((log.now(), *blocks_of(self, forward_batch, before)))
        return done

    hooked._dsim_hooked = True
    kind.step = hooked


def blocks_of(algorithm, forward, before):
    """A forward's rows, (request, phase, tokens, keys), and the positions that its blocks settled.

    before: the computed token ids. The step has waited for the device.
    """
    import torch

    size = algorithm.block_size
    masks = (before == algorithm.mask_id).view(-1, size)
    if forward.dllm_prompt_mask is not None:
        masks &= ~forward.dllm_prompt_mask
    settled = masks & (forward.input_ids.view(-1, size) != algorithm.mask_id)
    masks, settled = torch.stack((masks, settled)).tolist()
    prompts = {row[0] for row in _STATE["rows"] if row[1] == "prefill"}
    rows, blocks = [], []
    for name, past, masked, now in zip(forward.rids, forward.extend_prefix_lens_cpu, masks, settled, strict=True):
        # In an edited or redrawn block, tokens may change until it is emitted.
        decoded = any(masked) or _STATE["by_law"]
        phase = "prefill" if name in prompts else "denoise" if decoded else "flush"
        rows.append((name, phase, size, int(past) + size))
        if any(masked) and not _STATE["by_law"]:
            blocks.append((name, int(past), [i for i, is_settled in enumerate(now) if is_settled]))
    return rows, blocks


def rows_of(batch):
    """(request, phase, tokens, keys)."""
    names = [req.rid for req in batch.reqs]
    if batch.forward_mode.is_extend():
        phases = ["denoise" if batch.is_dllm() and not req.is_dllm_prefill() else "prefill" for req in batch.reqs]
        lengths = zip(names, phases, batch.extend_lens, batch.prefix_lens, strict=True)
        return [(name, phase, int(n), int(past) + int(n)) for name, phase, n, past in lengths]
    return [(name, "decode", 1, int(keys)) for name, keys in zip(names, batch.seq_lens_cpu.tolist(), strict=True)]


def write(log, begin, end, rows, **info):
    """Returns the step's number."""
    bidirectional = ("denoise", "flush")  # each query sees the whole block
    qk_pairs = sum(steplog.pairs(n, keys, phase in bidirectional) for _, phase, n, keys, _ in rows)
    heads = sum(n if phase in bidirectional else 1 for _, phase, n, _, _ in rows)
    prefill = sum(n for _, phase, n, _, _ in rows if phase == "prefill")
    return log.step(
        begin, end - begin, rows, sum_q_kv=qk_pairs, prefill_tokens=prefill, head_rows=heads, sampled_rows=heads, **info
    )


def header(scheduler):
    """The log's first line."""
    args, model = scheduler.server_args, scheduler.model_config
    dllm = getattr(scheduler, "dllm_config", None)
    settings = {} if dllm is None else steplog.read("threshold", lambda: dict(dllm.algorithm_config or {})) or {}
    preset = None if dllm is None else steplog.read("preset", lambda: preset_of(dllm))
    _STATE["by_law"] = preset not in ("sglang-fdfo", "sglang-sync")
    return steplog.readable(
        {
            "synthetic": lambda: False,
            "engine": engine,
            **steplog.machine(),
            "num_devices": lambda: scheduler.tp_size,
            "model": lambda: {
                "name": str(args.served_model_name or args.model_path),
                "context_limit": model.context_len,
                "config": steplog.config_of(model.hf_config),
            },
            "block_length": lambda: 1 if dllm is None else dllm.block_size,
            "threshold": lambda: float(settings.get("threshold", 1.0 if dllm is None else 0.95)),
            "page_size": lambda: scheduler.page_size,
            "num_pages": lambda: scheduler.max_total_num_tokens // scheduler.page_size,
            "preset": lambda: preset,
            # The scheduler has derived the missing arguments.
            "settings": lambda: steplog.readable(
                {
                    "max_running_requests": lambda: (scheduler if dllm is None else dllm).max_running_requests,
                    "chunked_prefill_size": lambda: scheduler.chunked_prefill_size,
                    "max_prefill_tokens": lambda: scheduler.max_prefill_tokens,
                    "dllm_fdfo": lambda: getattr(dllm, "first_done_first_out_mode", None),
                }
            ),
        }
    )


def engine():
    import sglang

    return f"SGLang {sglang.__version__}"


def preset_of(dllm):
    """dsim's preset, or None."""
    usual = "sglang-fdfo" if dllm.first_done_first_out_mode else "sglang-sync"
    presets = {
        "LowConfidence": usual,
        "JointThreshold": "sglang-joint",
        "JointThresholdInDel": "sglang-indel",
        "Gemma4Renoise": "sglang-gemma",
    }
    return presets.get(dllm.algorithm)
